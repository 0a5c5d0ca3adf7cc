// One green context and its streams: what a layout's partition is once the driver has made it.
#pragma once

#include <optional>
#include <vector>

#include "first_error.h"
#include "owners.h"

namespace mosaic {

// What is told to people about a partition; plain values that outlive it.
struct PartitionInfo {
    std::vector<int> slots;  // empty for the remainder
    bool is_remainder = false;
    unsigned requested_sms = 0;
    unsigned granted_sms = 0;                // read back from the green context
    std::optional<std::vector<int>> sm_ids;  // what a probe saw
    double creation_ms = 0;                  // the context and its streams
};

// How many streams a partition gets, of which priorities.
struct StreamTable {
    int streams_per_partition = 1;
    std::vector<int> priorities = {0};

    // Throws std::invalid_argument, naming what there is, for a priority that the table does not have.
    std::size_t row_of(int priority) const;
};

class Partition {
  public:
    // Makes the context, reads its SMs back, makes the streams. `asked` has slots and requested SMs.
    Partition(CUdevice device, CUdevResourceDesc sms, PartitionInfo asked, const StreamTable& table);

    const PartitionInfo& info() const { return info_; }
    void set_sm_ids(std::vector<int> ids) noexcept { info_.sm_ids = std::move(ids); }
    bool open() const { return context_.held(); }
    // Handles in the order of the table's rows.
    const std::vector<Stream>& streams() const { return streams_; }

    // Index of a free stream of the row, the one that was given back last; empty if all are lent. A shared one is lent
    // again to whoever shares, until its last borrower gives it back.
    std::optional<std::size_t> lend(std::size_t row, bool shared) noexcept;
    // False if the stream is not lent.
    bool give_back(std::size_t stream) noexcept;
    int num_lent() const noexcept;

    // For the probe: a stream of its own, so that lent ones are left alone.
    Stream make_extra_stream() const { return make_stream(context_, 0); }

    // The end, in three steps, since all streams of a pool end before the first context does.
    void drain(FirstError& first) noexcept;
    void close_streams(FirstError& first) noexcept;
    void close_context(FirstError& first) noexcept;

  private:
    void make_streams(const StreamTable& table);

    PartitionInfo info_;
    GreenContext context_;
    std::vector<Stream> streams_;
    std::vector<int> num_borrowers_;                  // by stream
    std::vector<std::vector<std::size_t>> free_;      // by row; never grows beyond what it was made with
    std::vector<std::optional<std::size_t>> shared_;  // by row, the stream that is lent to whoever shares
    std::size_t row_length_;
};

}  // namespace mosaic
