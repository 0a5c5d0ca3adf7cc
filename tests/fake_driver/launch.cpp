// Libraries, device memory, and the one kernel that the fake can run: mosaic_smid, which writes down the SMs of its
// stream's context. Work is done when it is launched.
//
// The quirk kernels_spread lets kernels of green streams use the device's last two SMs too, as a module with dynamic
// parallelism does on Hopper; kernels_nowhere writes nothing.
#include <algorithm>
#include <cstring>

#include "state.h"

namespace fake {
namespace {

constexpr const char* kKernel = "mosaic_smid";
constexpr unsigned kMostThreads = 1024;

Result cuLibraryLoadData(Library** out, const char* code, void*, void*, unsigned num_jit_options, void*, void*,
                         unsigned num_library_options) {
    FAKE_ENTER("cuLibraryLoadData");
    if (out == nullptr || code == nullptr || num_jit_options != 0 || num_library_options != 0) return kInvalidValue;
    if (*code == '\0') return kInvalidImage;
    auto library = std::make_unique<Library>();
    library->code = code;
    *out = keep(state().libraries, std::move(library));
    ++state().created["library"];
    return kSuccess;
}

Result cuLibraryUnload(Library* handle) {
    FAKE_ENTER("cuLibraryUnload");
    Library* library = find(state().libraries, handle);
    if (library == nullptr || !library->alive) return misuse("library_unloaded_twice", kInvalidValue);
    library->alive = false;
    ++state().destroyed["library"];
    return kSuccess;
}

// The fake's images are text that names the kernels in them.
Result cuLibraryGetKernel(void** out, Library* handle, const char* name) {
    FAKE_ENTER("cuLibraryGetKernel");
    const Library* library = find(state().libraries, handle);
    if (library == nullptr || !library->alive) return kInvalidHandle;
    if (library->code.find(name) == std::string::npos || std::strcmp(name, kKernel) != 0) return kNotFound;
    *out = handle;
    return kSuccess;
}

Memory* live_memory(DevicePointer pointer) {
    Memory* memory = find(state().memory, reinterpret_cast<void*>(pointer));
    return memory != nullptr && memory->alive ? memory : nullptr;
}

Result cuMemAlloc(DevicePointer* out, std::size_t bytes) {
    FAKE_ENTER("cuMemAlloc");
    if (current_device() < 0) return kInvalidContext;
    if (out == nullptr || bytes == 0) return kInvalidValue;
    auto memory = std::make_unique<Memory>();
    memory->words.assign((bytes + 3) / 4, 0xdeadbeef);
    *out = reinterpret_cast<DevicePointer>(keep(state().memory, std::move(memory)));
    ++state().created["memory"];
    return kSuccess;
}

Result cuMemFree(DevicePointer pointer) {
    FAKE_ENTER("cuMemFree");
    if (current_device() < 0) return kInvalidContext;
    Memory* memory = live_memory(pointer);
    if (memory == nullptr) return misuse("memory_freed_twice", kInvalidValue);
    memory->alive = false;
    ++state().destroyed["memory"];
    return kSuccess;
}

// The device whose work may be given to the stream now; -1 for a dead stream or no current context.
Result check_stream(void* handle) {
    if (current_device() < 0) return kInvalidContext;
    if (handle == nullptr) return kSuccess;
    const Stream* stream = find(state().streams, handle);
    if (stream == nullptr || !stream->alive || !stream->context->alive) return misuse("dead_stream", kInvalidHandle);
    return stream->context->device == current_device() ? kSuccess : kInvalidHandle;
}

Result cuMemsetD32Async(DevicePointer pointer, unsigned value, std::size_t words, void* stream) {
    FAKE_ENTER("cuMemsetD32Async");
    if (const Result bad = check_stream(stream)) return bad;
    Memory* memory = live_memory(pointer);
    if (memory == nullptr || words > memory->words.size()) return kInvalidValue;
    std::fill_n(memory->words.begin(), words, value);
    return kSuccess;
}

Result cuMemcpyDtoHAsync(void* out, DevicePointer pointer, std::size_t bytes, void* stream) {
    FAKE_ENTER("cuMemcpyDtoHAsync");
    if (const Result bad = check_stream(stream)) return bad;
    const Memory* memory = live_memory(pointer);
    if (memory == nullptr || bytes > memory->words.size() * sizeof(unsigned)) return kInvalidValue;
    std::memcpy(out, memory->words.data(), bytes);
    return kSuccess;
}

std::vector<unsigned> sms_of(void* handle) {
    const unsigned device_sms = state().devices[static_cast<std::size_t>(current_device())].num_sms;
    std::vector<unsigned> sms;
    if (state().quirk == "kernels_nowhere") return sms;
    if (const Stream* stream = find(state().streams, handle)) {
        sms = stream->context->sms;
        if (state().quirk == "kernels_spread") sms.insert(sms.end(), {device_sms - 2, device_sms - 1});
        return sms;
    }
    for (unsigned sm = 0; sm < device_sms; ++sm) sms.push_back(sm);
    return sms;
}

Result cuLaunchKernel(void* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned, void* stream, void** arguments, void** extra) {
    FAKE_ENTER("cuLaunchKernel");
    if (const Result bad = check_stream(stream)) return bad;
    const Library* library = find(state().libraries, kernel);
    if (library == nullptr || !library->alive) return kInvalidHandle;
    if (grid_x * grid_y * grid_z == 0 || block_x * block_y * block_z == 0 || extra != nullptr) return kInvalidValue;
    if (block_x * block_y * block_z > kMostThreads) return kInvalidValue;
    Memory* seen = live_memory(*static_cast<DevicePointer*>(arguments[0]));
    const unsigned words = *static_cast<unsigned*>(arguments[1]);
    if (seen == nullptr || words > seen->words.size()) return kInvalidValue;
    for (const unsigned sm : sms_of(stream)) {
        if (sm / 32 < words) seen->words[sm / 32] |= 1u << (sm % 32);
    }
    return kSuccess;
}

}  // namespace

const std::vector<Function>& launch_functions() {
    static const std::vector<Function> functions = {
        {"cuLibraryLoadData", 12000, address_of(&cuLibraryLoadData)},
        {"cuLibraryUnload", 12000, address_of(&cuLibraryUnload)},
        {"cuLibraryGetKernel", 12000, address_of(&cuLibraryGetKernel)},
        {"cuLaunchKernel", 4000, address_of(&cuLaunchKernel)},
        {"cuMemAlloc", 3020, address_of(&cuMemAlloc)},
        {"cuMemFree", 3020, address_of(&cuMemFree)},
        {"cuMemsetD32Async", 3020, address_of(&cuMemsetD32Async)},
        {"cuMemcpyDtoHAsync", 3020, address_of(&cuMemcpyDtoHAsync)},
    };
    return functions;
}

}  // namespace fake
