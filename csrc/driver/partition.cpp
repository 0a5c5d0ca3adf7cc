#include "partition.h"

#include <chrono>

namespace mosaic {
namespace {

unsigned read_back_sms(const GreenContext& context) {
    CUdevResource granted{};
    MOSAIC_CALL(cuGreenCtxGetDevResource, context.get(), &granted, CU_DEV_RESOURCE_TYPE_SM);
    return granted.sm.smCount;
}

}  // namespace

Partition::Partition(CUdevice device, CUdevResourceDesc sms, PartitionInfo asked)
    : info_(std::move(asked)), context_(nullptr), stream_(nullptr) {
    const auto start = std::chrono::steady_clock::now();
    context_ = make_green_context(sms, device);
    info_.granted_sms = read_back_sms(context_);
    stream_ = make_stream(context_);
    info_.creation_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

CUstream Partition::lend() noexcept {
    ++num_borrowers_;
    return stream_.get();
}

bool Partition::give_back() noexcept {
    if (num_borrowers_ == 0) return false;
    --num_borrowers_;
    return true;
}

void Partition::drain(FirstError& first) noexcept {
    first.run([&] { MOSAIC_CALL(cuStreamSynchronize, stream_.get()); });
}

void Partition::close_stream(FirstError& first) noexcept {
    first.run([&] { stream_.close(); });
}

void Partition::close_context(FirstError& first) noexcept {
    first.run([&] { context_.close(); });
}

}  // namespace mosaic
