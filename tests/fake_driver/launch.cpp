// Libraries, device memory, and the one kernel that the fake can run: mosaic_smid, which writes down the SMs of its
// stream's context. Work is done when its stream is waited for and not before: cuStreamSynchronize "waits until the
// device has completed all operations in the stream specified" (cuda.h), which says nothing of other streams.
//
// Which SMs a kernel reaches follows from its grid: blocks fill one SM after the other, which nobody rules out, and
// stay as long as they spin. So a grid that is too small, or whose blocks do not wait, misses SMs.
//
// The quirk kernels_spread lets kernels of green streams use the device's last two SMs too: "On Compute Architecture
// 9.x: When a module with dynamic parallelism (CDP) is loaded, all future kernels running under green contexts may use
// and share an additional set of 2 SMs" (cuda.h, green contexts); kernels_spread_far does so with the last three, and
// kernels_nowhere writes nothing.
#include <algorithm>
#include <cstring>

#include "resource.h"

namespace fake {
namespace {

constexpr const char* kKernel = "mosaic_smid";
constexpr unsigned kMostThreads = 1024;
constexpr unsigned kThreadsOfSm = 2048;
constexpr unsigned kBlocksOfSm = 32;

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

// Freeing "may perform implicit synchronization" (cuda.h, cuMemFree), which nobody should count on.
bool is_still_there(const Memory* memory) {
    if (!memory->alive) misuse("work_on_freed_memory", kSuccess);
    return memory->alive;
}

Result cuMemsetD32Async(DevicePointer pointer, unsigned value, std::size_t words, void* handle) {
    FAKE_ENTER("cuMemsetD32Async");
    Stream* stream = nullptr;
    if (const Result bad = find_stream(handle, &stream)) return bad;
    Memory* memory = live_memory(pointer);
    if (memory == nullptr || words > memory->words.size()) return kInvalidValue;
    give(*stream, [=] {
        if (is_still_there(memory)) std::fill_n(memory->words.begin(), words, value);
    });
    return kSuccess;
}

Result cuMemcpyDtoHAsync(void* out, DevicePointer pointer, std::size_t bytes, void* handle) {
    FAKE_ENTER("cuMemcpyDtoHAsync");
    Stream* stream = nullptr;
    if (const Result bad = find_stream(handle, &stream)) return bad;
    const Memory* memory = live_memory(pointer);
    if (memory == nullptr || bytes > memory->words.size() * sizeof(unsigned)) return kInvalidValue;
    give(*stream, [=] {
        if (is_still_there(memory)) std::memcpy(out, memory->words.data(), bytes);
    });
    return kSuccess;
}

std::vector<unsigned> sms_of(const Stream& stream) {
    if (state().quirk == "kernels_nowhere") return {};
    std::vector<unsigned> all = sm_ids(stream.device);
    if (stream.context == nullptr) return all;
    std::vector<unsigned> sms = stream.context->sms;
    const int more = state().quirk == "kernels_spread" ? 2 : state().quirk == "kernels_spread_far" ? 3 : 0;
    sms.insert(sms.end(), all.end() - more, all.end());
    return sms;
}

// How many SMs the blocks of a grid fill at least.
std::size_t sms_filled(unsigned blocks, unsigned threads, unsigned long long spin_ns) {
    const unsigned per_sm = std::min(kBlocksOfSm, kThreadsOfSm / threads);
    return spin_ns == 0 ? 1 : (blocks + per_sm - 1) / per_sm;
}

Result cuLaunchKernel(void* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned, void* handle, void** arguments, void** extra) {
    FAKE_ENTER("cuLaunchKernel");
    Stream* stream = nullptr;
    if (const Result bad = find_stream(handle, &stream)) return bad;
    const Library* library = find(state().libraries, kernel);
    if (library == nullptr || !library->alive) return kInvalidHandle;
    const unsigned blocks = grid_x * grid_y * grid_z;
    const unsigned threads = block_x * block_y * block_z;
    if (blocks == 0 || threads == 0 || threads > kMostThreads || extra != nullptr) return kInvalidValue;
    Memory* seen = live_memory(*static_cast<DevicePointer*>(arguments[0]));
    const unsigned words = *static_cast<unsigned*>(arguments[1]);
    if (seen == nullptr || words > seen->words.size()) return kInvalidValue;
    std::vector<unsigned> sms = sms_of(*stream);
    const auto spin_ns = *static_cast<unsigned long long*>(arguments[2]);
    sms.resize(std::min(sms.size(), sms_filled(blocks, threads, spin_ns)));
    give(*stream, [=] {
        for (const unsigned sm : is_still_there(seen) ? sms : std::vector<unsigned>{}) {
            if (sm / 32 < words) seen->words[sm / 32] |= 1u << (sm % 32);
        }
    });
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
