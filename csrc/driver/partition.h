// One green context and its stream: what a layout's partition is once the driver has made it.
#pragma once

#include <optional>
#include <vector>

#include "first_error.h"
#include "owners.h"

namespace mosaic {

// What is told to people about a partition; plain values that outlive it.
struct PartitionInfo {
    std::vector<int> slots;
    unsigned requested_sms = 0;
    unsigned granted_sms = 0;                // read back from the green context
    std::optional<std::vector<int>> sm_ids;  // what a probe saw
    double creation_ms = 0;                  // the context and its stream
};

class Partition {
  public:
    // Makes the context, reads its SMs back, makes the stream. `asked` has slots and requested SMs.
    Partition(CUdevice device, CUdevResourceDesc sms, PartitionInfo asked);

    const PartitionInfo& info() const { return info_; }
    void set_sm_ids(std::vector<int> ids) noexcept { info_.sm_ids = std::move(ids); }
    CUstream stream() const { return stream_.get(); }

    // The stream goes to whoever asks; it counts as lent until each of them has given it back.
    CUstream lend() noexcept;
    // False if the stream is not lent.
    bool give_back() noexcept;
    bool is_lent() const noexcept { return num_borrowers_ > 0; }

    // For the probe: a stream of its own, so that lent ones are left alone.
    Stream make_extra_stream() const { return make_stream(context_); }

    // The end, in three steps, since all streams of a pool end before the first context does.
    void drain(FirstError& first) noexcept;
    void close_stream(FirstError& first) noexcept;
    void close_context(FirstError& first) noexcept;

  private:
    PartitionInfo info_;
    GreenContext context_;
    Stream stream_;
    int num_borrowers_ = 0;
};

}  // namespace mosaic
