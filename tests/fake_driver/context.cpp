// The stack of current contexts, which each thread has of its own, and what is asked of the current one.
//
// MOSAIC_FAKE_CURRENT=0 puts the primary context of device 0 at the bottom of every thread's stack, as torch's runtime
// does. "Pops the current CUDA context from the CPU thread and passes back the old context handle in *pctx" (cuda.h,
// cuCtxPopCurrent); "this method does not pop the context from stack in any circumstances"
// (cuDevicePrimaryCtxRelease).
#include "state.h"

namespace fake {
namespace {

constexpr std::size_t kTotalBytes = std::size_t{80} << 30;

// Devices, whose primary contexts these are.
std::vector<int>& stack() {
    thread_local std::vector<int> current =
        state().first_current < 0 ? std::vector<int>{} : std::vector<int>{state().first_current};
    return current;
}

Result cuCtxPushCurrent(void* context) {
    FAKE_ENTER("cuCtxPushCurrent");
    for (const auto& [device, references] : state().primary_references) {
        if (context != &references) continue;
        if (references == 0) return misuse("dead_primary_pushed", kContextIsDestroyed);
        stack().push_back(device);
        return kSuccess;
    }
    return misuse("unknown_context", kInvalidContext);
}

Result cuCtxPopCurrent(void** context) {
    FAKE_ENTER("cuCtxPopCurrent");
    if (stack().empty()) return misuse("popped_too_often", kInvalidContext);
    *context = &state().primary_references[stack().back()];
    stack().pop_back();
    return kSuccess;
}

Result cuMemGetInfo(std::size_t* free, std::size_t* total) {
    FAKE_ENTER("cuMemGetInfo");
    if (stack().empty()) return kInvalidContext;
    *total = kTotalBytes;
    *free = kTotalBytes - state().used_bytes[stack().back()];
    return kSuccess;
}

}  // namespace

int current_device() { return stack().empty() ? -1 : stack().back(); }

const std::vector<Function>& context_functions() {
    static const std::vector<Function> functions = {
        {"cuCtxPushCurrent", 4000, address_of(&cuCtxPushCurrent)},
        {"cuCtxPopCurrent", 4000, address_of(&cuCtxPopCurrent)},
        {"cuMemGetInfo", 3020, address_of(&cuMemGetInfo)},
    };
    return functions;
}

}  // namespace fake

extern "C" int mosaic_fake_device_of(const void* context) {
    for (const auto& [device, references] : fake::state().primary_references) {
        if (context == &references) return device;
    }
    return -1;
}
extern "C" int mosaic_fake_depth() { return static_cast<int>(fake::stack().size()); }
