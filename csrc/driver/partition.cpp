#include "partition.h"

#include <algorithm>
#include <chrono>
#include <string>

namespace mosaic {
namespace {

unsigned read_back_sms(const GreenContext& context) {
    CUdevResource granted{};
    MOSAIC_CALL(cuGreenCtxGetDevResource, context.get(), &granted, CU_DEV_RESOURCE_TYPE_SM);
    return granted.sm.smCount;
}

}  // namespace

std::size_t StreamTable::row_of(int priority) const {
    const auto found = std::find(priorities.begin(), priorities.end(), priority);
    if (found != priorities.end()) return static_cast<std::size_t>(found - priorities.begin());
    std::string known;
    for (const int one : priorities) known += (known.empty() ? "" : ", ") + std::to_string(one);
    throw std::invalid_argument("priority=" + std::to_string(priority) + " is none of this pool's (" + known +
                                "); use one of them, or make the pool with priorities that include it");
}

Partition::Partition(CUdevice device, CUdevResourceDesc sms, PartitionInfo asked, const StreamTable& table)
    : info_(std::move(asked)),
      context_(nullptr),
      free_(table.priorities.size()),
      shared_(table.priorities.size()),
      row_length_(static_cast<std::size_t>(table.streams_per_partition)) {
    const auto start = std::chrono::steady_clock::now();
    context_ = make_green_context(sms, device);
    info_.granted_sms = read_back_sms(context_);
    make_streams(table);
    info_.creation_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

void Partition::make_streams(const StreamTable& table) {
    streams_.reserve(free_.size() * row_length_);
    for (std::size_t row = 0; row < free_.size(); ++row) {
        for (std::size_t i = 0; i < row_length_; ++i) {
            streams_.push_back(make_stream(context_, table.priorities[row]));
        }
        // Taken from the end: the row's first stream is lent first.
        for (std::size_t i = row_length_; i-- > 0;) free_[row].push_back(row * row_length_ + i);
    }
    num_borrowers_.assign(streams_.size(), 0);
}

std::optional<std::size_t> Partition::lend(std::size_t row, bool shared) noexcept {
    if (shared && shared_[row]) {
        ++num_borrowers_[*shared_[row]];
        return shared_[row];
    }
    std::vector<std::size_t>& free = free_[row];
    if (free.empty()) return std::nullopt;
    const std::size_t stream = free.back();
    free.pop_back();
    num_borrowers_[stream] = 1;
    if (shared) shared_[row] = stream;
    return stream;
}

bool Partition::give_back(std::size_t stream) noexcept {
    if (num_borrowers_[stream] == 0) return false;
    if (--num_borrowers_[stream] > 0) return true;
    const std::size_t row = stream / row_length_;
    if (shared_[row] == stream) shared_[row].reset();
    free_[row].push_back(stream);  // within the capacity it was made with
    return true;
}

int Partition::num_lent() const noexcept {
    return static_cast<int>(std::count_if(num_borrowers_.begin(), num_borrowers_.end(), [](int n) { return n > 0; }));
}

void Partition::drain(FirstError& first) noexcept {
    for (const Stream& stream : streams_) first.run([&] { MOSAIC_CALL(cuStreamSynchronize, stream.get()); });
}

void Partition::close_streams(FirstError& first) noexcept {
    for (Stream& stream : streams_) first.run([&] { stream.close(); });
}

void Partition::close_context(FirstError& first) noexcept {
    first.run([&] { context_.close(); });
}

}  // namespace mosaic
