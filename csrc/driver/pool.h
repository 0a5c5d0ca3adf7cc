// Streams made beforehand for the partitions of a plan's layouts, one for each, and lent by table look-up.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "partition.h"
#include "slots.h"

namespace mosaic {

// The partitions that are in force together, as slots: as a caller wrote them.
using LayoutSlots = std::vector<std::vector<int>>;

// What adding a layout made; all zero when every partition existed.
struct LayoutCost {
    int num_contexts = 0;
    double creation_ms = 0;
    // Growth of the memory in use on the device; wrong by what others took or gave meanwhile.
    long long driver_bytes = 0;
};

struct PoolStats {
    int num_contexts = 0;
    int num_lent = 0;
    double creation_ms = 0;
    long long driver_bytes = 0;
    std::vector<LayoutCost> layouts;
};

// Everything is under one lock. Calls that make or end driver objects hold it for as long as the driver takes;
// lend and give_back for less than a microsecond, so they leave taking it to the caller, who may try first.
class StreamPool {
  public:
    using Lock = std::unique_lock<std::mutex>;

    StreamPool(const Device& device, const std::vector<LayoutSlots>& layouts);
    ~StreamPool() noexcept;
    StreamPool(const StreamPool&) = delete;
    StreamPool& operator=(const StreamPool&) = delete;

    const SlotSplit& split() const { return split_; }

    // All below throw Unavailable in a forked child, and std::invalid_argument for what is not there.
    Lock lock() const;
    Lock try_lock() const;  // owns nothing if the lock is taken

    LayoutCost add_layout(const LayoutSlots& layout);
    // A partition has one stream, and whoever asks gets it; each gives it back once.
    CUstream lend(const Lock& held, int layout, int partition);
    void give_back(const Lock& held, CUstream stream);
    std::vector<PartitionInfo> partitions(const Lock& held, int layout) const;
    PoolStats stats(const Lock& held) const;
    bool closed() const { return closed_; }

    // Reads the SM ids of every partition with the probe; what they say about a layout is the caller's to judge.
    void verify(const std::string& image);
    // Waits for the streams, then ends streams, contexts and the hold on the primary context. What fails does
    // not keep the rest from ending; the first failure is thrown. A second call does nothing.
    void close();

  private:
    struct Layout {
        std::vector<std::size_t> partitions;
        LayoutCost cost;
    };
    struct Made {
        std::vector<std::unique_ptr<Partition>> partitions;
        LayoutCost cost;
    };
    void require_open() const;
    LayoutCost add(const LayoutSlots& layout);
    Made make(const std::vector<SlotSet>& sets) const;
    void adopt(std::vector<std::unique_ptr<Partition>> made);
    const Layout& layout_at(int layout) const;
    FirstError end_all() noexcept;

    Origin origin_;
    SlotSplit split_;
    mutable std::mutex mutex_;
    std::atomic<bool> closed_{false};
    // From here on in the order in which it has to die, last first.
    PrimaryContext primary_;
    std::vector<std::unique_ptr<Partition>> partitions_;
    std::vector<Layout> layouts_;
    std::map<std::vector<int>, std::size_t> known_;  // by its slots
    std::unordered_map<CUstream, std::size_t> partition_of_;
};

}  // namespace mosaic
