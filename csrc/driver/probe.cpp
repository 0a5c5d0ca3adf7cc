#include "probe.h"

#include <array>

namespace mosaic {

const char* const kProbeSource = R"(// Notes the SM of each block: bit smid % 32 of seen[smid / 32].
// Blocks spin for a while, so that later ones find the first SMs taken and go to the others.
extern "C" __global__ void mosaic_smid(unsigned* seen, unsigned words, unsigned long long spin_ns) {
    if (threadIdx.x == 0) {
        unsigned smid;
        unsigned long long start, now;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(smid));
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
        do {
            asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        } while (now - start < spin_ns);
        if (smid / 32 < words) atomicOr(&seen[smid / 32], 1u << (smid % 32));
    }
    __syncthreads();
}
)";

namespace {

// SM ids are not promised to be contiguous, so there is room for more of them than any device has SMs.
constexpr unsigned kWords = 32;
// Two blocks of this size fill an SM, so four blocks for each SM of the device are two rounds or more.
constexpr unsigned kThreadsPerBlock = 1024;
constexpr unsigned kBlocksPerSm = 4;
constexpr unsigned long long kSpinNs = 20'000;

// As a library and not as a module: a module's function belongs to the context in which it was loaded, while
// "the context to launch the kernel on" of a library's kernel is "taken from the specified stream" (cuda.h,
// cuLaunchKernel), which is what a green context's stream needs.
Library load(const std::string& image) {
    CUlibrary library = nullptr;
    MOSAIC_CALL(cuLibraryLoadData, &library, image.c_str(), nullptr, nullptr, 0u, nullptr, nullptr, 0u);
    return Library(library);
}

DeviceMemory allocate(std::size_t bytes) {
    CUdeviceptr memory = 0;
    MOSAIC_CALL(cuMemAlloc, &memory, bytes);
    return DeviceMemory(memory);
}

std::vector<int> ids_of(const std::array<unsigned, kWords>& seen) {
    std::vector<int> ids;
    for (unsigned id = 0; id < 32 * kWords; ++id) {
        if (seen[id / 32] >> (id % 32) & 1u) ids.push_back(static_cast<int>(id));
    }
    return ids;
}

}  // namespace

Probe::Probe(const Device& device, const std::string& image)
    : num_sms_(device.num_sms()), library_(load(image)), seen_(allocate(kWords * sizeof(unsigned))) {
    MOSAIC_CALL(cuLibraryGetKernel, &kernel_, library_.get(), "mosaic_smid");
}

std::vector<int> Probe::run(CUstream stream) const {
    std::array<unsigned, kWords> seen{};
    CUdeviceptr memory = seen_.get();
    unsigned words = kWords;
    unsigned long long spin_ns = kSpinNs;
    std::array<void*, 3> arguments = {&memory, &words, &spin_ns};
    const unsigned blocks = kBlocksPerSm * static_cast<unsigned>(num_sms_);
    MOSAIC_CALL(cuMemsetD32Async, memory, 0u, std::size_t{kWords}, stream);
    MOSAIC_CALL(cuLaunchKernel, reinterpret_cast<CUfunction>(kernel_), blocks, 1u, 1u, kThreadsPerBlock, 1u, 1u, 0u,
                stream, arguments.data(), nullptr);
    MOSAIC_CALL(cuMemcpyDtoHAsync, seen.data(), memory, sizeof seen, stream);
    MOSAIC_CALL(cuStreamSynchronize, stream);
    std::vector<int> ids = ids_of(seen);
    if (ids.empty()) throw_broken("cuLaunchKernel", "the probe ran on no SM");
    return ids;
}

void Probe::close() {
    seen_.close();
    library_.close();
}

std::vector<int> probe_stream(const Device& device, CUstream stream, const std::string& image) {
    PrimaryContext primary(device.handle());
    CurrentContext current(primary);
    Probe probe(device, image);
    std::vector<int> ids = probe.run(stream);
    probe.close();
    current.close();
    primary.close();
    return ids;
}

}  // namespace mosaic
