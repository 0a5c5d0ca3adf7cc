#include "owners.h"

namespace mosaic {

PrimaryContext::PrimaryContext(CUdevice device) {
    MOSAIC_CALL(cuDevicePrimaryCtxRetain, &context_, device);
    device_ = device;
}

PrimaryContext::~PrimaryContext() noexcept {
    // Nobody is left to hear of a failure; at process exit the driver may be gone already.
    if (device_ && origin_.is_here()) driver().functions().cuDevicePrimaryCtxRelease(*device_);
}

PrimaryContext::PrimaryContext(PrimaryContext&& other) noexcept
    : origin_(other.origin_),
      device_(std::exchange(other.device_, std::nullopt)),
      context_(std::exchange(other.context_, nullptr)) {}

PrimaryContext& PrimaryContext::operator=(PrimaryContext&& other) noexcept {
    std::swap(origin_, other.origin_);
    std::swap(device_, other.device_);
    std::swap(context_, other.context_);
    return *this;
}

void PrimaryContext::close() {
    if (!device_) return;
    origin_.require_here("this primary context");
    // Given up before the call: a release that failed is not tried again by the destructor.
    const CUdevice device = *std::exchange(device_, std::nullopt);
    MOSAIC_CALL(cuDevicePrimaryCtxRelease, device);
}

CurrentContext::CurrentContext(const PrimaryContext& primary) {
    MOSAIC_CALL(cuCtxPushCurrent, primary.handle());
    pushed_ = true;
}

CurrentContext::~CurrentContext() noexcept {
    CUcontext popped = nullptr;
    if (pushed_) driver().functions().cuCtxPopCurrent(&popped);
}

void CurrentContext::close() {
    if (!std::exchange(pushed_, false)) return;
    CUcontext popped = nullptr;
    MOSAIC_CALL(cuCtxPopCurrent, &popped);
}

GreenContext make_green_context(CUdevResourceDesc sms, CUdevice device) {
    // Looked at first: a context that could not be ended later must not be made.
    if (driver().functions().cuGreenCtxDestroy == nullptr) throw_missing("cuGreenCtxDestroy");
    CUgreenCtx context = nullptr;
    MOSAIC_CALL(cuGreenCtxCreate, &context, sms, device, unsigned{CU_GREEN_CTX_DEFAULT_STREAM});
    return GreenContext(context);
}

Stream make_stream(const GreenContext& context) {
    CUstream stream = nullptr;
    MOSAIC_CALL(cuGreenCtxStreamCreate, &stream, context.get(), unsigned{CU_STREAM_NON_BLOCKING}, 0);
    return Stream(stream);
}

}  // namespace mosaic
