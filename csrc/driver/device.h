// One CUDA device and what the driver says about its streaming multiprocessors.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "driver.h"

namespace mosaic {

int device_count();

class Device {
  public:
    // Throws std::invalid_argument for an ordinal that this machine does not have.
    explicit Device(int ordinal);

    int ordinal() const { return ordinal_; }
    CUdevice handle() const { return handle_; }
    const std::string& name() const { return name_; }
    // As nvidia-smi and NVML print it: "GPU-" and 32 hexadecimal digits in five groups.
    const std::string& uuid() const { return uuid_; }
    std::pair<int, int> compute_capability() const { return compute_capability_; }
    int num_sms() const { return num_sms_; }
    std::size_t total_memory_bytes() const { return total_memory_bytes_; }

    // The whole device as a resource that can be split; asked anew at each call.
    CUdevResource sm_resource() const;

  private:
    int ordinal_;
    CUdevice handle_ = 0;
    std::string name_;
    std::string uuid_;
    std::pair<int, int> compute_capability_;
    int num_sms_ = 0;
    std::size_t total_memory_bytes_ = 0;
};

}  // namespace mosaic
