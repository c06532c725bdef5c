// A file as a read-only memory map that outlives being cut short. The kernel answers a read beyond the end of a mapped
// file, or of a page that the disk no longer gives, with SIGBUS, whose default ends the process. Here a handler puts
// zeros in the place of what is gone and counts that; whoever used the bytes asks afterwards (`faults`, `stamp`) and
// throws its result away. The same is done by libwayland for buffers that a client may cut short.
//
// A fault outside the maps that are registered here goes to the handler that was there before. Another handler may come
// over ours, as Python's faulthandler does: see `install` and `pass_on`.

#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>
#include <string>
#include <tuple>

namespace nb = nanobind;

namespace {

struct Region {
    std::atomic<uintptr_t> begin{0};
    std::atomic<uintptr_t> end{0};  // 0: the entry is free
    std::atomic<uint64_t> faults{0};
};

constexpr size_t kRegions = 8192;  // files of the largest checkpoints and replica directories, several times
Region regions[kRegions];
std::atomic<size_t> used{0};  // entries that were ever in use
std::mutex registering;
struct sigaction before;

// Below: only what may be called in a signal handler, that is atomics and system calls.

uintptr_t page_bytes() { return static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)); }

// To the end of the map: what follows a cut is gone as well, and the file is not used again.
bool put_zeros(Region& region, uintptr_t first) {
    void* zeros = mmap(reinterpret_cast<void*>(first), region.end.load() - first, PROT_READ,
                       MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (zeros == MAP_FAILED) return false;
    region.faults.fetch_add(1);
    return true;
}

bool replace_page_at(uintptr_t at) {
    for (size_t i = 0; i < used.load(std::memory_order_acquire); ++i)
        if (regions[i].begin.load() <= at && at < regions[i].end.load())
            return put_zeros(regions[i], at & ~(page_bytes() - 1));
    return false;
}

// The kernel reads the eight bytes before it finds that nothing is asked of it, and answers a bad address by a number.
bool is_readable(uintptr_t at) {
    return syscall(SYS_rt_sigprocmask, ~0, at, nullptr, sizeof(uint64_t)) != -1 || errno != EFAULT;
}

// The same without an address: in every map whose last page is gone, from the first page that is.
bool replace_all_cuts() {
    bool found = false;
    const uintptr_t page = page_bytes();
    for (size_t i = 0; i < used.load(std::memory_order_acquire); ++i) {
        uintptr_t gone = regions[i].end.load();
        if (gone == 0 || is_readable(gone - page)) continue;
        gone -= page;
        for (uintptr_t there = regions[i].begin.load() & ~(page - 1); there < gone;) {
            const uintptr_t middle = there + (gone - there) / page / 2 * page;
            if (is_readable(middle))
                there = middle + page;
            else
                gone = middle;
        }
        found = put_zeros(regions[i], gone) || found;
    }
    return found;
}

// Of this thread: it is in a handler that ours called. initial-exec: a handler may not allocate.
static thread_local __attribute__((tls_model("initial-exec"))) bool passing_on = false;

// What is not ours. A handler that came over ours, and that ours came over again, may hand the signal back to ours, by a
// call or by raise(): the second time ends the process.
void pass_on(int number, siginfo_t* info, void* context) {
    const bool has_info = before.sa_flags & SA_SIGINFO;
    if (passing_on || (!has_info && (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN))) {
        signal(number, SIG_DFL);
        if (info->si_code <= 0) raise(number);  // a fault repeats by itself
        return;
    }
    passing_on = true;
    if (has_info) {
        before.sa_sigaction(number, info, context);
    } else {
        before.sa_handler(number);
    }
    passing_on = false;
}

void on_bus_error(int number, siginfo_t* info, void* context) {
    const int saved = errno;
    // A handler that came over ours reports a fault first, puts ours back and calls raise(), as faulthandler does.
    const bool was_raised = info->si_code == SI_TKILL && info->si_pid == getpid() && !passing_on;
    const bool is_ours = info->si_code > 0 ? replace_page_at(reinterpret_cast<uintptr_t>(info->si_addr))
                                           : was_raised && replace_all_cuts();
    errno = saved;
    if (!is_ours) pass_on(number, info, context);
}

// Again at every file: another handler may have come over ours.
void install() {
    struct sigaction now;
    sigaction(SIGBUS, nullptr, &now);
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error) return;
    before = now;
    struct sigaction ours = {};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, nullptr);
}

// An entry for a map, until its `end` is 0 again.
Region* watch(uintptr_t address, size_t length) {
    std::lock_guard<std::mutex> lock(registering);
    install();
    size_t index = 0;
    while (index < kRegions && regions[index].end.load() != 0) ++index;
    if (index == kRegions) throw std::runtime_error("too many mapped files");
    const uintptr_t page = page_bytes();
    regions[index].faults.store(0);
    regions[index].begin.store(address);
    regions[index].end.store((address + length + page - 1) & ~(page - 1));
    if (index >= used.load()) used.store(index + 1, std::memory_order_release);
    return &regions[index];
}

class File {
  public:
    explicit File(const std::string& path) : descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
        if (descriptor_ < 0) fail(path);
        struct stat status;
        if (fstat(descriptor_, &status) != 0) fail(path);
        if (!S_ISREG(status.st_mode)) {
            errno = EINVAL;
            fail(path);
        }
        length_ = static_cast<size_t>(status.st_size);
        if (length_ == 0) return;
        address_ = mmap(nullptr, length_, PROT_READ, MAP_SHARED, descriptor_, 0);
        if (address_ == MAP_FAILED) {
            address_ = nullptr;
            fail(path);
        }
        region_ = watch(reinterpret_cast<uintptr_t>(address_), length_);
    }
    ~File() { close_all(); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    void* address() const { return address_; }
    size_t length() const { return length_; }
    uint64_t faults() const { return region_ ? region_->faults.load() : 0; }

    // Size, time of the last write, and time of the last change, of the file as it is now. Whoever writes may put the
    // second back, nobody the third. It is 0 of a file without a name: that it lost its name was a change as well.
    std::tuple<int64_t, int64_t, int64_t> stamp() const {
        struct stat status;
        if (fstat(descriptor_, &status) != 0) return {-1, -1, -1};
        const auto ns = [](const timespec& time) { return time.tv_sec * 1000000000LL + time.tv_nsec; };
        return {status.st_size, ns(status.st_mtim), status.st_nlink ? ns(status.st_ctim) : 0};
    }

    // Gives back the pages read so far; not after a fault, which would map what replaced them away from the file.
    void release() {
        if (address_ && faults() == 0) madvise(address_, length_, MADV_DONTNEED);
    }

  private:
    void close_all() {
        if (address_) munmap(address_, length_);
        if (region_) {
            std::lock_guard<std::mutex> lock(registering);
            region_->begin.store(~uintptr_t{0});
            region_->end.store(0);
        }
        if (descriptor_ >= 0) close(descriptor_);
        address_ = nullptr, region_ = nullptr, descriptor_ = -1;
    }
    [[noreturn]] void fail(const std::string& path) {
        const int reason = errno;
        close_all();
        errno = reason;
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
        throw nb::python_error();
    }

    int descriptor_;
    void* address_ = nullptr;
    size_t length_ = 0;
    Region* region_ = nullptr;
};

}  // namespace

NB_MODULE(_mapping, module) {
    nb::class_<File>(module, "File")
        .def(nb::init<const std::string&>(), nb::arg("path"))
        .def_prop_ro("faults", &File::faults)
        .def("stamp", &File::stamp)
        .def("release", &File::release)
        .def("bytes", [](nb::object self) {
            const File& file = nb::cast<const File&>(self);
            size_t shape[1] = {file.length()};
            // the array keeps the file, so views of it never outlive the map
            return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(file.address(), 1, shape, self);
        });
}
