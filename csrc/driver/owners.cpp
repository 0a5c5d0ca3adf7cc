#include "owners.h"

#include <utility>

namespace mosaic {

PrimaryContext::PrimaryContext(CUdevice device) {
    CUcontext context = nullptr;
    MOSAIC_CALL(cuDevicePrimaryCtxRetain, &context, device);
    device_ = device;
}

PrimaryContext::~PrimaryContext() noexcept {
    // Nobody is left to hear of a failure; at process exit the driver may be gone already.
    if (device_) driver().functions().cuDevicePrimaryCtxRelease(*device_);
}

PrimaryContext::PrimaryContext(PrimaryContext&& other) noexcept : device_(std::exchange(other.device_, std::nullopt)) {}

PrimaryContext& PrimaryContext::operator=(PrimaryContext&& other) noexcept {
    std::swap(device_, other.device_);
    return *this;
}

void PrimaryContext::close() {
    if (!device_) return;
    // Given up before the call: a release that failed is not tried again by the destructor.
    const CUdevice device = *std::exchange(device_, std::nullopt);
    MOSAIC_CALL(cuDevicePrimaryCtxRelease, device);
}

}  // namespace mosaic
