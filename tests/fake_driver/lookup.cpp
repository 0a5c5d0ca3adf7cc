// Look-up of functions by name and version.
#include <cstring>

#include "state.h"

namespace fake {
namespace {

// Forms that other CUDA versions have of functions in the lists: with arguments of other types, so that a caller that
// gets one and passes what it was written for goes wrong without an error.
Result form_of_another_version() {
    const std::lock_guard<std::mutex> guard(state().mutex);
    return misuse("form_of_another_version", kInvalidValue);
}

// By the PFN types of cudaTypedefs.h.
const std::vector<Function>& earlier_forms() {
    static const std::vector<Function> functions = {
        {"cuDeviceGetUuid", 9020, address_of(&form_of_another_version)},
        {"cuDeviceTotalMem", 2000, address_of(&form_of_another_version)},
        {"cuDevicePrimaryCtxRelease", 7000, address_of(&form_of_another_version)},
        {"cuStreamDestroy", 2000, address_of(&form_of_another_version)},
        {"cuCtxPushCurrent", 2000, address_of(&form_of_another_version)},
        {"cuCtxPopCurrent", 2000, address_of(&form_of_another_version)},
        {"cuMemGetInfo", 2000, address_of(&form_of_another_version)},
        {"cuMemAlloc", 2000, address_of(&form_of_another_version)},
        {"cuMemFree", 2000, address_of(&form_of_another_version)},
        {"cuMemcpyDtoHAsync", 2000, address_of(&form_of_another_version)},
    };
    return functions;
}

// "If the specified CUDA version is greater than or equal to the CUDA version in which the driver symbol was
// introduced, this API will return the function pointer to the corresponding versioned function" (cuda.h,
// cuGetProcAddress). From 14.0 on, which is made up, every function has a newer form.
void* look_up(const char* name, int version, int* found) {
    constexpr int kNextForms = 14000;
    const Function* newest = nullptr;
    *found = 1;  // CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
    for (const auto* functions : {&device_functions(), &split_functions(), &green_functions(), &context_functions(),
                                  &launch_functions(), &earlier_forms()}) {
        for (const Function& function : *functions) {
            if (std::strcmp(function.name, name) != 0) continue;
            if (*found == 1) *found = 2;  // CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
            if (function.since > version || (newest != nullptr && newest->since > function.since)) continue;
            newest = &function;
        }
    }
    if (newest == nullptr) return nullptr;
    *found = 0;
    return version < kNextForms ? newest->address : address_of(&form_of_another_version);
}

}  // namespace
}  // namespace fake

// The only driver symbol that can be linked or found by dlsym: all others go through it, as they should.
extern "C" fake::Result cuGetProcAddress_v2(const char* name, void** address, int version, std::uint64_t flags,
                                            int* found) {
    FAKE_ENTER("cuGetProcAddress");
    *address = nullptr;
    if (version > fake::state().version) return fake::kInvalidValue;
    // "This will enable the search for all driver symbols that match the requested driver symbol name including the
    // per-thread versions": there stream 0 would be another one than the legacy default stream.
    if (flags & fake::kPerThreadDefaultStream) fake::misuse("per_thread_forms", fake::kSuccess);
    int result = 0;
    *address = fake::look_up(name, version, &result);
    if (found != nullptr) *found = result;
    return fake::kSuccess;
}
