// Which SMs does a stream really run on? A kernel that writes down the SM of each of its blocks tells.
#pragma once

#include <string>
#include <vector>

#include "device.h"
#include "owners.h"

namespace mosaic {

// CUDA C++ of the kernel, to be compiled by whoever has a compiler (NVRTC, nvcc).
extern const char* const kProbeSource;

// The compiled kernel, loaded, and the memory that it writes to. Needs the device's primary context to be
// current in every call, the destructor included.
class Probe {
  public:
    // image: a cubin, or PTX, of kProbeSource.
    Probe(const Device& device, const std::string& image);

    // Sorted ids of the SMs that the stream's kernels run on. Waits for the stream.
    std::vector<int> run(CUstream stream) const;
    void close();

  private:
    int num_sms_;
    Library library_;
    CUkernel kernel_ = nullptr;
    DeviceMemory seen_;
};

// The same for any stream of the device, whoever made it; null is the legacy default stream.
std::vector<int> probe_stream(const Device& device, CUstream stream, const std::string& image);

}  // namespace mosaic
