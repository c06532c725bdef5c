// A file as a read-only memory map that outlives being cut short. The kernel answers a read beyond the end of a mapped
// file, or of a page that the disk no longer gives, with SIGBUS, whose default ends the process. Here a handler puts
// zeros in the place of what is gone and counts that; whoever used the bytes asks afterwards (`faults`, `stamp`) and
// throws its result away. The same is done by libwayland for buffers that a client may cut short.
//
// A fault outside the maps that are registered here goes to the handler that was there before.

#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

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

// Only what may be called in a signal handler: atomics and mmap, which is one system call.
void on_bus_error(int number, siginfo_t* info, void* context) {
    const auto at = reinterpret_cast<uintptr_t>(info->si_addr);
    if (info->si_code > 0) {  // a fault, not a kill()
        for (size_t i = 0; i < used.load(std::memory_order_acquire); ++i) {
            const uintptr_t end = regions[i].end.load(), begin = regions[i].begin.load();
            if (at < begin || at >= end) continue;
            const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
            const uintptr_t first = at & ~(page - 1);
            const int saved = errno;
            // to the end of the map: what follows a cut is gone as well, and the file is not used again
            void* zeros = mmap(reinterpret_cast<void*>(first), end - first, PROT_READ,
                               MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            errno = saved;
            if (zeros == MAP_FAILED) break;
            regions[i].faults.fetch_add(1);
            return;
        }
    }
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
        signal(number, SIG_DFL);
        if (info->si_code <= 0) raise(number);  // a fault repeats by itself
    } else {
        before.sa_handler(number);
    }
}

// Again at every file: a library may have put its own handler in between (faulthandler does).
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

class Watch {
  public:
    Watch(uintptr_t address, size_t length) {
        std::lock_guard<std::mutex> lock(registering);
        install();
        for (index_ = 0; index_ < kRegions && regions[index_].end.load() != 0; ++index_) {
        }
        if (index_ == kRegions) throw std::runtime_error("too many mapped files");
        const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
        regions[index_].faults.store(0);
        regions[index_].begin.store(address);
        regions[index_].end.store((address + length + page - 1) & ~(page - 1));
        if (index_ >= used.load()) used.store(index_ + 1, std::memory_order_release);
    }
    ~Watch() {
        std::lock_guard<std::mutex> lock(registering);
        regions[index_].begin.store(~uintptr_t{0});
        regions[index_].end.store(0);
    }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

    uint64_t faults() const { return regions[index_].faults.load(); }

  private:
    size_t index_;
};

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
        watch_ = new Watch(reinterpret_cast<uintptr_t>(address_), length_);
    }
    ~File() { close_all(); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    void* address() const { return address_; }
    size_t length() const { return length_; }
    uint64_t faults() const { return watch_ ? watch_->faults() : 0; }

    // Size and time of the last change, of the file as it is now.
    std::pair<int64_t, int64_t> stamp() const {
        struct stat status;
        if (fstat(descriptor_, &status) != 0) return {-1, -1};
        return {status.st_size, status.st_mtim.tv_sec * 1000000000LL + status.st_mtim.tv_nsec};
    }

    // Gives back the pages read so far; not after a fault, which would map what replaced them away from the file.
    void release() {
        if (address_ && faults() == 0) madvise(address_, length_, MADV_DONTNEED);
    }

  private:
    void close_all() {
        if (address_) munmap(address_, length_);
        delete watch_;
        if (descriptor_ >= 0) close(descriptor_);
        address_ = nullptr, watch_ = nullptr, descriptor_ = -1;
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
    Watch* watch_ = nullptr;
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
    nb::class_<Watch>(module, "Watch")
        .def(nb::init<uintptr_t, size_t>(), nb::arg("address"), nb::arg("length"))
        .def_prop_ro("faults", &Watch::faults);
}
