// The stack of current contexts, which each thread has of its own, and what is asked of the current one.
#include "state.h"

namespace fake {
namespace {

constexpr std::size_t kTotalBytes = std::size_t{80} << 30;

thread_local std::vector<int> current;  // devices, whose primary contexts these are

Result cuCtxPushCurrent(void* context) {
    FAKE_ENTER("cuCtxPushCurrent");
    for (const auto& [device, references] : state().primary_references) {
        if (context != &references) continue;
        if (references == 0) return misuse("dead_primary_pushed", kContextIsDestroyed);
        current.push_back(device);
        return kSuccess;
    }
    return misuse("unknown_context", kInvalidContext);
}

Result cuCtxPopCurrent(void** context) {
    FAKE_ENTER("cuCtxPopCurrent");
    if (current.empty()) return misuse("popped_too_often", kInvalidContext);
    *context = &state().primary_references[current.back()];
    current.pop_back();
    return kSuccess;
}

Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    FAKE_ENTER("cuCtxGetStreamPriorityRange");
    if (current.empty()) return kInvalidContext;
    *least = 0;
    *greatest = -5;
    return kSuccess;
}

Result cuMemGetInfo(std::size_t* free, std::size_t* total) {
    FAKE_ENTER("cuMemGetInfo");
    if (current.empty()) return kInvalidContext;
    *total = kTotalBytes;
    *free = kTotalBytes - state().used_bytes[current.back()];
    return kSuccess;
}

}  // namespace

int current_device() { return current.empty() ? -1 : current.back(); }

const std::vector<Function>& context_functions() {
    static const std::vector<Function> functions = {
        {"cuCtxPushCurrent", 4000, address_of(&cuCtxPushCurrent)},
        {"cuCtxPopCurrent", 4000, address_of(&cuCtxPopCurrent)},
        {"cuCtxGetStreamPriorityRange", 5050, address_of(&cuCtxGetStreamPriorityRange)},
        {"cuMemGetInfo", 3020, address_of(&cuMemGetInfo)},
    };
    return functions;
}

}  // namespace fake

extern "C" int mosaic_fake_depth() { return static_cast<int>(fake::current.size()); }
