#!/usr/bin/env python3
"""What does this GPU machine offer the plugin? Needs torch alone, no vLLM.

Host processor, link bandwidths, latencies of every way to hand a layer to the host and back (eager and inside one CUDA
graph), and what quantizing an expert on the GPU costs. One JSON object last. Each part is a process of its own with a
limit, and those that may hang or spoil the next launch come last: what was found before them is kept.
usage: python3 probe_gpu.py [--quick] [--part NAME,...]
"""

import argparse
import ctypes
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HIDDEN, INTER = 4096, 14336
LIMIT_S = 45
"""Of a part: the longest takes some 15 s."""
FOUND: dict = {}


def say(name, value):
    FOUND[name] = value
    print(f"{name:44s} {value}", flush=True)


def printed(*words):
    """The lines that a program prints, or why it does not run."""
    try:
        r = subprocess.run(words, capture_output=True, text=True)
    except OSError as error:
        return [f"{words[0]}: {error.strerror}"]
    return (r.stdout + r.stderr).strip().splitlines() or [""]


def fields_of(path):
    """name -> value of a file of lines `name : value`; of a name that comes again the first."""
    found = {}
    with open(path) as file:
        for line in file:
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
    return found


def host():
    processor = fields_of("/proc/cpuinfo")
    flags = set(processor.get("flags", "").split())
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
    say("cpu", processor.get("model name", os.uname().machine))
    say("cores", len(os.sched_getaffinity(0)))
    say("instructions", " ".join(flag for flag in wanted if flag in flags))
    say("memory", fields_of("/proc/meminfo")["MemTotal"])
    layout = ("L2", "L3", "NUMA node(s)", "Socket")
    say("caches", "; ".join(" ".join(line.split()) for line in printed("lscpu") if any(one in line for one in layout)))
    say("kernel, glibc", f"{os.uname().release}, {os.confstr('CS_GNU_LIBC_VERSION')}")
    nvcc = [line for line in printed("nvcc", "--version") if "release" in line] or ["no nvcc"]
    say("compilers", "; ".join((printed("g++", "--version")[0], nvcc[0], printed("cmake", "--version")[0])))
    asked = "name,driver_version,pcie.link.gen.current,pcie.link.width.current,memory.total"
    say("gpu", "; ".join(printed("nvidia-smi", "--format=csv,noheader", f"--query-gpu={asked}")))
    folders = ("/tmp", "/dev/shm")
    say("disk, shm", "; ".join(f"{folder} {shutil.disk_usage(folder).free / 1e9:.1f} GB free" for folder in folders))
    say("memlock", resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def median_us(function, n=200, warm=20):
    for _ in range(warm):
        function()
    times = []
    for _ in range(n):
        t = time.perf_counter_ns()
        function()
        times.append((time.perf_counter_ns() - t) / 1e3)
    times.sort()
    return round(statistics.median(times), 2), round(times[int(n * 0.99) - 1], 2)


def rate(torch, n, copy):
    """GB/s of a copy of n bytes, the best of four."""
    copy()
    torch.cuda.synchronize()
    best = 1e9
    for _ in range(4):
        t = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - t)
    return round(n / best / 1e9, 1)


def bandwidths(torch, megabytes):
    n = megabytes << 20
    gpu = torch.empty(n, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(n, dtype=torch.uint8, pin_memory=True)
    pageable = torch.ones(n, dtype=torch.uint8)

    say("H2D pinned GB/s", rate(torch, n, lambda: gpu.copy_(pinned, non_blocking=True)))
    say("D2H pinned GB/s", rate(torch, n, lambda: pinned.copy_(gpu, non_blocking=True)))
    say("H2D pageable GB/s", rate(torch, n, lambda: gpu.copy_(pageable)))
    say("D2H pageable GB/s", rate(torch, n, lambda: pageable.copy_(gpu)))
    other = torch.empty_like(gpu)
    say("D2D GB/s, bytes read and written", round(2 * rate(torch, n, lambda: other.copy_(gpu)), 0))
    from_a_map(torch, gpu, n)


def from_a_map(torch, gpu, n):
    """As experts leave the pool: by the driver alone, and into pinned memory by 1, 4 and 8 threads, mapped or read."""
    from concurrent.futures import ThreadPoolExecutor

    pinned = torch.empty(n, dtype=torch.uint8, pin_memory=True)
    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile(dir="/tmp") as f:
        f.write(bytes(n))
        f.flush()
        mapped = torch.from_file(f.name, shared=False, size=n, dtype=torch.uint8)
        say("H2D from a mapped file GB/s", rate(torch, n, lambda: gpu.copy_(mapped)))
        view = memoryview(pinned.numpy())
        for threads in (1, 4, 8):
            step = n // threads
            with ThreadPoolExecutor(threads) as pool:

                def copy(pool=pool, step=step):
                    list(pool.map(lambda at: pinned[at : at + step].copy_(mapped[at : at + step]), range(0, n, step)))

                def read(pool=pool, step=step):
                    list(pool.map(lambda at: os.preadv(f.fileno(), [view[at : at + step]], at), range(0, n, step)))

                say(f"map to pinned, {threads} threads GB/s", rate(torch, n, copy))
                say(f"preadv to pinned, {threads} threads GB/s", rate(torch, n, read))


def registering(torch, megabytes):
    """The pool: a mapped file. A refusal stays CUDA's last error, so nothing may be launched behind it."""
    n = megabytes << 20
    gpu = torch.empty(n, dtype=torch.uint8, device="cuda")
    with tempfile.NamedTemporaryFile(dir="/tmp") as f:
        f.write(bytes(n))
        f.flush()
        for name, shared in (("private, writable", False), ("shared, writable", True)):
            mapped = torch.from_file(f.name, shared=shared, size=n, dtype=torch.uint8)
            t = time.perf_counter()
            error = torch.cuda.cudart().cudaHostRegister(mapped.data_ptr(), n, 0)
            say(f"  cudaHostRegister of it ({name})", f"error {int(error)}, {time.perf_counter() - t:.3f} s")
            if int(error):
                return
            say(
                f"  H2D from it registered ({name}) GB/s",
                rate(torch, n, lambda m=mapped: gpu.copy_(m, non_blocking=True)),
            )
            torch.cuda.cudart().cudaHostUnregister(mapped.data_ptr())


def host_rates(torch):
    """What the host's cores read and multiply together; cold experts are computed by them where no device is."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # a part before this one may have left one
    ones = torch.ones(1 << 28)
    a, b = torch.randn(4096, 4096).bfloat16(), torch.randn(4096, 4096).bfloat16()

    def best_s(function):
        function()
        times = []
        for _ in range(5):
            t = time.perf_counter()
            function()
            times.append(time.perf_counter() - t)
        return min(times)

    say("threads of torch", torch.get_num_threads())
    say("host reads GB/s", round(ones.nbytes / best_s(ones.sum) / 1e9, 1))
    say("host bf16 GFLOP/s", round(2 * 4096**3 / best_s(lambda: a @ b) / 1e9, 1))
    say("host memory bytes", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    say("gpu memory bytes", torch.cuda.get_device_properties(0).total_memory)


def checked(result):
    error = result[0] if isinstance(result, tuple) else result
    if int(error):
        raise RuntimeError(str(error))


class Flags:
    """Two words in pinned memory: what the GPU asks, what the host answers."""

    def __init__(self, torch, layers=1):
        self.tensor = torch.zeros(64 * layers, dtype=torch.int32, pin_memory=True)  # a cache line per word
        self.words, self.at = self.tensor.numpy(), self.tensor.data_ptr()

    def ask(self, layer):
        return self.at + 4 * 64 * layer

    def answer(self, layer):
        return self.at + 4 * (64 * layer + 16)


def latencies(torch):
    x = torch.randn(1, HIDDEN, device="cuda", dtype=torch.bfloat16)
    pinned = torch.empty(1, HIDDEN, dtype=torch.bfloat16, pin_memory=True)
    answer = torch.randn(1, HIDDEN)
    pinned_answer = answer.pin_memory()
    back = torch.empty(1, HIDDEN, device="cuda")
    event = torch.cuda.Event()

    def kernel():
        x.mul_(1.0)

    def sync():
        kernel()
        torch.cuda.synchronize()

    def pageable():
        kernel()
        x.cpu()

    def to_pinned():
        kernel()
        pinned.copy_(x, non_blocking=True)
        event.record()
        event.synchronize()

    say("kernel launch, host side us", median_us(kernel))
    torch.cuda.synchronize()
    event.record()
    event.synchronize()
    say("event query, done us", median_us(event.query))
    say("kernel + synchronize us (p50, p99)", median_us(sync))
    say("kernel + .cpu() of 8 KB us", median_us(pageable))
    say("kernel + copy to pinned + event us", median_us(to_pinned))
    say(".to('cuda') of 16 KB pageable us", median_us(lambda: back.copy_(answer)))
    say("copy of 16 KB pinned, not waited for us", median_us(lambda: back.copy_(pinned_answer, non_blocking=True)))
    torch.cuda.synchronize()


def stream_words(torch):
    """Stream memory operations: may be refused, and may wait for ever where the host's words are not seen."""
    from cuda.bindings import driver as cu

    geq = int(cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
    x = torch.randn(1, HIDDEN, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.current_stream().cuda_stream
    flags, seq = Flags(torch), [0]

    def kernel():
        x.mul_(1.0)

    def spin():
        seq[0] += 1
        kernel()
        checked(cu.cuStreamWriteValue32(stream, flags.ask(0), seq[0], 0))
        while flags.words[0] != seq[0]:
            pass

    def round_trip():
        seq[0] += 1
        kernel()
        checked(cu.cuStreamWriteValue32(stream, flags.ask(0), seq[0], 0))
        checked(cu.cuStreamWaitValue32(stream, flags.answer(0), seq[0], geq))
        kernel()
        checked(cu.cuStreamWriteValue32(stream, flags.at + 4 * 32, seq[0], 0))
        while flags.words[0] != seq[0]:
            pass
        flags.words[16] = seq[0]
        while flags.words[32] != seq[0]:
            pass

    say("kernel + cuStreamWriteValue32 + host spin us", median_us(spin))
    say("ask, answer, kernel, tell: 2 crossings us", median_us(round_trip))


SOURCE = """
void tell(void *word) { ++*(volatile int *)word; }

// As the host's side of `replays` runs: where a layer asks, take that back and answer. Two lines of the cache a layer.
void answer(int *words, int layers, int replays) {
    for (int n = 0; n < replays * layers; ++n) {
        int *mine = words + 64 * (n % layers);
        while (__atomic_load_n(mine, __ATOMIC_ACQUIRE) != 1) {}
        mine[0] = 0;
        __atomic_store_n(mine + 16, 1, __ATOMIC_RELEASE);
    }
}
"""


def host_code():
    """SOURCE, compiled; its functions run without the interpreter's lock."""
    folder = tempfile.mkdtemp()
    source, library = os.path.join(folder, "host.c"), os.path.join(folder, "host.so")
    with open(source, "w") as f:
        f.write(SOURCE)
    if (said := printed("cc", "-O1", "-shared", "-fPIC", "-o", library, source)) != [""]:
        raise RuntimeError(f"no C compiler: {said[0]}")
    return ctypes.CDLL(library)


def host_function(torch):
    """cuLaunchHostFunc with a function in C: what KTransformers does. g++ is needed."""
    from cuda.bindings import driver as cu

    x = torch.randn(1, HIDDEN, device="cuda", dtype=torch.bfloat16)
    stream, flags = torch.cuda.current_stream().cuda_stream, Flags(torch)

    def kernel():
        x.mul_(1.0)

    function = cu.CUhostFn(ctypes.cast(host_code().tell, ctypes.c_void_p).value)
    flags.words[48] = 0

    def call():
        want = int(flags.words[48]) + 1
        kernel()
        checked(cu.cuLaunchHostFunc(stream, function, flags.at + 4 * 48))
        while flags.words[48] != want:
            pass

    say("kernel + cuLaunchHostFunc + host spin us", median_us(call))
    torch.cuda.synchronize()


def whole_graph(torch, layers=32):
    """32 layers in one graph; in each the GPU asks, works, waits for the host and reads its answer in pinned memory."""
    from cuda.bindings import driver as cu

    equal = int(cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
    flags = Flags(torch, layers)
    partial = torch.ones(HIDDEN, pin_memory=True)
    x = torch.zeros(HIDDEN, device="cuda")
    work, landing = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16), torch.empty(HIDDEN, device="cuda")
    work @ work
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        for layer in range(layers):
            x.mul_(1.0)
            checked(cu.cuStreamWriteValue32(stream, flags.ask(layer), 1, 0))
            work @ work  # the hot experts
            checked(cu.cuStreamWaitValue32(stream, flags.answer(layer), 1, equal))
            checked(cu.cuStreamWriteValue32(stream, flags.answer(layer), 0, 0))  # armed for the next replay
            landing.copy_(partial, non_blocking=True)
            x.add_(landing)
    replays = 50
    thread = threading.Thread(target=host_code().answer, args=(ctypes.c_void_p(flags.at), layers, replays), daemon=True)
    thread.start()  # in C: a thread of Python would hold the lock, for which replay() and synchronize() wait 5 ms each
    times = []
    for _ in range(replays):
        t = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - t) / layers * 1e6)
    thread.join()
    say("one graph, host asked in each of 32 layers: us a layer", round(statistics.median(times[10:]), 2))
    say("  every answer arrived", bool((x == 1.0 * replays * layers).all()))


def quantizing(torch):
    w = torch.randn(2 * INTER, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def fp8():
        scale = w.abs().amax(1, keepdim=True).float() / 448
        return (w / scale).to(torch.float8_e4m3fn), scale

    def int4():
        g = w.view(2 * INTER, HIDDEN // 128, 128)
        lo, hi = g.amin(2, keepdim=True), g.amax(2, keepdim=True)
        scale = (hi - lo) / 15
        q = ((g - lo) / scale).round_().clamp_(0, 15).to(torch.uint8).view(2 * INTER, HIDDEN)
        return q[:, ::2] | (q[:, 1::2] << 4), scale, lo

    for name, function in (("fp8 per row", fp8), ("int4 g128", int4)):
        function()
        torch.cuda.synchronize()
        t = time.perf_counter()
        for _ in range(5):
            function()
        torch.cuda.synchronize()
        say(f"gate and up of one expert to {name}, plain torch ms", round((time.perf_counter() - t) * 200, 2))


PARTS = {
    "bandwidths": lambda torch, quick: bandwidths(torch, 64 if quick else 352),
    "latencies": lambda torch, quick: latencies(torch),
    "host rates": lambda torch, quick: host_rates(torch),
    "quantizing": lambda torch, quick: quantizing(torch),
    "host function": lambda torch, quick: host_function(torch),
    "stream words": lambda torch, quick: stream_words(torch),
    "whole graph": lambda torch, quick: whole_graph(torch),
    "registering": lambda torch, quick: registering(torch, 64 if quick else 352),
}
"""By name; from `host function` on each may hang, and the last one leaves an error behind."""


def run_part(name, quick):
    """In this process; its figures as one JSON object last."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    try:
        for one in name.split(","):
            PARTS[one](torch, quick)
    finally:
        print(json.dumps(FOUND), flush=True)


def apart(name, quick):
    """In a process of its own, which is left to itself if not even a kill ends it."""
    words = [sys.executable, os.path.abspath(__file__), "--part", name] + ["--quick"] * quick
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT)
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            status = f"it took longer than {LIMIT_S} s"
        said.seek(0)
        lines = said.read().splitlines()
    for line in lines:
        if line.startswith("{"):
            FOUND.update(json.loads(line))
        else:
            print(line, flush=True)
    if status:
        say(f"FAILED {name}", status if isinstance(status, str) else (lines or [""])[-2:][0])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", metavar="NAME,...", help="these alone, in this process")
    arguments = parser.parse_args()
    if arguments.part:
        run_part(arguments.part, arguments.quick)
        return 0
    host()
    for name in PARTS:
        apart(name, arguments.quick)
        print(json.dumps(FOUND), flush=True)
    return 1 if any(name.startswith("FAILED") for name in FOUND) else 0


if __name__ == "__main__":
    sys.exit(main())
