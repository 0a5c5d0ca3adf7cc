#include "driver.h"

#include <dlfcn.h>

#include <atomic>

#include "process.h"

namespace mosaic {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";
constexpr const char* kNeeded = "an NVIDIA driver of CUDA 12.5 or newer and a GPU it serves";

constexpr DriverFunction kFunctions[] = {
#define MOSAIC_ENTRY(name, since, use) {#name, since, Use::use},
    MOSAIC_DRIVER_FUNCTIONS(MOSAIC_ENTRY)
#undef MOSAIC_ENTRY
};

// cuGetProcAddress itself has to be found the plain way. Its five-argument form is CUDA 12.0's.
using GetProcAddress = decltype(&::cuGetProcAddress);

GetProcAddress open_library() {
    void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const char* reason = dlerror();
        throw Unavailable("no NVIDIA driver on this machine", reason ? reason : "no libcuda.so.1", kNeeded);
    }
    auto* entry = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
    if (entry == nullptr) {
        throw Unavailable("the NVIDIA driver is too old", "libcuda.so.1 without cuGetProcAddress_v2", kNeeded);
    }
    return entry;
}

// Null where the driver does not have the function. Asking for a version above the driver's own is an
// error by cuGetProcAddress's rules, so such functions are not asked for.
void* look_up(GetProcAddress entry, const Functions& known, int driver_version, const char* name, int since) {
    if (since > driver_version) return nullptr;
    void* address = nullptr;
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SUCCESS;
    const CUresult status = entry(name, &address, since, CU_GET_PROC_ADDRESS_DEFAULT, &found);
    if (status == CUDA_ERROR_NOT_FOUND) return nullptr;
    if (status != CUDA_SUCCESS) throw_cuda_error(known, "cuGetProcAddress", status);
    return found == CU_GET_PROC_ADDRESS_SUCCESS ? address : nullptr;
}

int read_version(GetProcAddress entry) {
    constexpr int kSince = 2020;
    void* address = look_up(entry, Functions{}, kSince, "cuDriverGetVersion", kSince);
    if (address == nullptr) {
        throw Unavailable("the NVIDIA driver does not report its version", "libcuda.so.1 without cuDriverGetVersion",
                          kNeeded);
    }
    int version = 0;
    const CUresult status = reinterpret_cast<decltype(&::cuDriverGetVersion)>(address)(&version);
    if (status != CUDA_SUCCESS) throw_cuda_error(Functions{}, "cuDriverGetVersion", status);
    return version;
}

std::string status_name(const Functions& functions, CUresult status) {
    const char* name = nullptr;
    if (functions.cuGetErrorName != nullptr && functions.cuGetErrorName(status, &name) == CUDA_SUCCESS &&
        name != nullptr) {
        return name;
    }
    return "CUresult " + std::to_string(static_cast<int>(status));
}

std::string status_text(const Functions& functions, CUresult status) {
    const char* text = nullptr;
    if (functions.cuGetErrorString != nullptr && functions.cuGetErrorString(status, &text) == CUDA_SUCCESS &&
        text != nullptr) {
        return std::string(": ") + text;
    }
    return "";
}

// Of these cuda.h says: "This leaves the process in an inconsistent state and any further CUDA work will return the
// same error. To continue using CUDA, the process must be terminated and relaunched."
bool is_for_good(CUresult status) {
    return status == CUDA_ERROR_ILLEGAL_ADDRESS || status == CUDA_ERROR_LAUNCH_TIMEOUT ||
           (status >= CUDA_ERROR_HARDWARE_STACK_ERROR && status <= CUDA_ERROR_LAUNCH_FAILED);
}

}  // namespace

Driver::Driver() {
    const GetProcAddress entry = open_library();
    version_ = read_version(entry);
    // The error functions come first in the list, so that a later failure can be named.
#define MOSAIC_LOOK_UP(name, since, use) \
    functions_.name = reinterpret_cast<decltype(functions_.name)>(look_up(entry, functions_, version_, #name, since));
    MOSAIC_DRIVER_FUNCTIONS(MOSAIC_LOOK_UP)
#undef MOSAIC_LOOK_UP
    const DriverFunction* function = kFunctions;
#define MOSAIC_COLLECT(name, since, use)                           \
    if (functions_.name == nullptr) missing_.push_back(*function); \
    ++function;
    MOSAIC_DRIVER_FUNCTIONS(MOSAIC_COLLECT)
#undef MOSAIC_COLLECT
}

const Driver& driver() {
    static const Driver* const instance = new Driver();
    return *instance;
}

void initialise() {
    static std::atomic<const Origin*> first{nullptr};
    if (const Origin* origin = first.load()) origin->require_here("the CUDA driver's state");
    const Functions& functions = driver().functions();
    if (functions.cuInit == nullptr) throw_missing("cuInit");
    const CUresult status = functions.cuInit(0);
    if (status == CUDA_SUCCESS) {
        static const Origin here;
        first.store(&here);
        return;
    }
    if (status == CUDA_ERROR_NO_DEVICE || status == CUDA_ERROR_STUB_LIBRARY) {
        throw Unavailable("the NVIDIA driver finds no device", "cuInit gave " + status_name(functions, status),
                          kNeeded);
    }
    throw_cuda_error(functions, "cuInit", status);
}

std::string version_text(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void throw_cuda_error(const Functions& functions, const char* call, CUresult status) {
    const std::string name = status_name(functions, status);
    const char* way_out = is_for_good(status) ? "; an earlier kernel failed, and CUDA is unusable in this process: "
                                                "start it anew, with CUDA_LAUNCH_BLOCKING=1 to find the kernel"
                                              : "";
    throw CudaError(std::string(call) + " failed with " + name + status_text(functions, status) + way_out, call, name);
}

bool driver_has_ended(const CudaError& error) {
    return error.status() == status_name(driver().functions(), CUDA_ERROR_DEINITIALIZED);
}

void throw_broken(const char* call, const std::string& what) {
    throw CudaError(std::string(call) + " returned CUDA_SUCCESS but " + what +
                        "; this driver's partitions are unreliable, use another version",
                    call, "CUDA_SUCCESS");
}

void throw_missing(const char* call) {
    const std::string found = "a driver of CUDA " + version_text(driver().version());
    std::string needed = "a driver with this function";
    for (const DriverFunction& function : driver().missing()) {
        if (std::string(function.name) == call) {
            needed = "a driver of CUDA " + version_text(function.since) + " or newer";
        }
    }
    throw Unavailable(std::string("the NVIDIA driver has no ") + call, found, needed);
}

}  // namespace mosaic
