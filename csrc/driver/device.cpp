#include "device.h"

#include <array>
#include <cstdio>

namespace mosaic {
namespace {

void require_ordinal(int ordinal) {
    const int count = device_count();
    if (count == 0) {
        throw Unavailable("the NVIDIA driver finds no device", "cuDeviceGetCount returned 0",
                          "at least one CUDA device; see CUDA_VISIBLE_DEVICES");
    }
    if (ordinal < 0 || ordinal >= count) {
        throw std::invalid_argument("ordinal=" + std::to_string(ordinal) + " names no device: this machine has " +
                                    std::to_string(count) + "; use 0 to " + std::to_string(count - 1));
    }
}

int attribute(CUdevice handle, CUdevice_attribute which) {
    int value = 0;
    MOSAIC_CALL(cuDeviceGetAttribute, &value, which, handle);
    return value;
}

std::string read_name(CUdevice handle) {
    std::array<char, 256> name{};
    MOSAIC_CALL(cuDeviceGetName, name.data(), static_cast<int>(name.size()) - 1, handle);
    return name.data();
}

std::string read_uuid(CUdevice handle) {
    CUuuid uuid{};
    MOSAIC_CALL(cuDeviceGetUuid, &uuid, handle);
    std::string text = "GPU-";
    for (int byte = 0; byte < 16; ++byte) {
        if (byte == 4 || byte == 6 || byte == 8 || byte == 10) text += '-';
        std::array<char, 3> digits{};
        std::snprintf(digits.data(), digits.size(), "%02x", static_cast<unsigned char>(uuid.bytes[byte]));
        text += digits.data();
    }
    return text;
}

}  // namespace

int device_count() {
    initialise();
    int count = 0;
    MOSAIC_CALL(cuDeviceGetCount, &count);
    return count;
}

Device::Device(int ordinal) : ordinal_(ordinal) {
    require_ordinal(ordinal);
    MOSAIC_CALL(cuDeviceGet, &handle_, ordinal);
    name_ = read_name(handle_);
    uuid_ = read_uuid(handle_);
    compute_capability_ = {attribute(handle_, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                           attribute(handle_, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)};
    num_sms_ = attribute(handle_, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    MOSAIC_CALL(cuDeviceTotalMem, &total_memory_bytes_, handle_);
}

CUdevResource Device::sm_resource() const {
    CUdevResource resource{};
    MOSAIC_CALL(cuDeviceGetDevResource, handle_, &resource, CU_DEV_RESOURCE_TYPE_SM);
    return resource;
}

}  // namespace mosaic
