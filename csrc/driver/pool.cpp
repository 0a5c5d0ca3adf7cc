#include "pool.h"

#include <algorithm>
#include <set>

namespace mosaic {
namespace {

// Of the current context's device.
long long free_bytes() {
    std::size_t free = 0;
    std::size_t total = 0;
    MOSAIC_CALL(cuMemGetInfo, &free, &total);
    return static_cast<long long>(free);
}

void check_table(const StreamTable& table) {
    if (table.streams_per_partition < 1) {
        throw std::invalid_argument("streams_per_partition=" + std::to_string(table.streams_per_partition) +
                                    " leaves nothing to lend; use 1 or more");
    }
    if (table.priorities.empty()) {
        throw std::invalid_argument("priorities=[] leaves nothing to lend; use [0] for streams without a preference");
    }
    if (std::set<int>(table.priorities.begin(), table.priorities.end()).size() != table.priorities.size()) {
        throw std::invalid_argument("priorities names one twice; use streams_per_partition for more streams of each");
    }
}

PoolOptions checked(PoolOptions options) {
    check_table(options.streams);
    require_placement(options.placement);
    return options;
}

}  // namespace

StreamPool::StreamPool(const Device& device, const std::vector<LayoutSlots>& layouts, PoolOptions options)
    : options_(checked(std::move(options))), split_(device, options_.fine), primary_(device.handle()) {
    check_options();
    if (options_.remainder) add_remainder();
    for (const LayoutSlots& layout : layouts) add(layout);
}

StreamPool::~StreamPool() noexcept {
    // In a forked child the members know by themselves that they are not to call the driver.
    if (origin_.is_here() && !closed_) static_cast<void>(end_all());
}

void StreamPool::check_options() const {
    int least = 0;
    int greatest = 0;
    CurrentContext current(primary_);
    MOSAIC_CALL(cuCtxGetStreamPriorityRange, &least, &greatest);
    current.close();
    for (const int priority : options_.streams.priorities) {
        if (priority <= least && priority >= greatest) continue;
        throw std::invalid_argument("priority " + std::to_string(priority) + " is not one of the device's; use " +
                                    std::to_string(greatest) + " (first) to " + std::to_string(least) + " (last)");
    }
    if (!options_.remainder) return;
    if (options_.placement == Placement::split) {
        throw std::invalid_argument(
            "remainder=True with placement='split': each layout's split leaves other SMs over; use "
            "placement='merged', or make a partition of the layout for communication");
    }
    if (split_.remainder_sms() == 0) {
        throw std::invalid_argument("remainder=True, but the split leaves 0 of " +
                                    std::to_string(split_.device().num_sms()) +
                                    " SMs over; use remainder=False, or keep a slot for communication");
    }
}

StreamPool::Lock StreamPool::lock() const {
    origin_.require_here("this stream pool");
    return Lock(mutex_);
}

StreamPool::Lock StreamPool::try_lock() const {
    origin_.require_here("this stream pool");
    return Lock(mutex_, std::try_to_lock);
}

void StreamPool::require_open() const {
    if (closed_) throw std::invalid_argument("this stream pool is closed; make a new one");
}

LayoutCost StreamPool::add_layout(const LayoutSlots& layout) {
    const Lock held = lock();
    require_open();
    return add(layout);
}

StreamPool::Key StreamPool::key_of(const std::vector<SlotSet>& sets, std::size_t partition) const {
    Key key = {sets[partition].slots};
    if (options_.placement == Placement::split) {
        for (const SlotSet& set : sets) key.push_back(set.slots);
    }
    return key;
}

// Whatever may fail comes before the first change of a member, so a failure leaves the pool as it was.
LayoutCost StreamPool::add(const LayoutSlots& slots) {
    const std::vector<SlotSet> sets = check_layout(split_, slots);
    Layout layout;
    std::vector<SlotSet> missing;
    std::vector<PartitionInfo> asked;
    std::map<Key, std::size_t> keys;
    for (std::size_t i = 0; i < sets.size(); ++i) {
        Key key = key_of(sets, i);
        const auto found = known_.find(key);
        layout.partitions.push_back(found != known_.end() ? found->second : partitions_.size() + missing.size());
        if (found != known_.end()) continue;
        keys.emplace(std::move(key), layout.partitions.back());
        missing.push_back(sets[i]);
        asked.push_back({sets[i].slots, false, sets[i].num_sms, 0, std::nullopt, 0});
    }
    layouts_.reserve(layouts_.size() + 1);
    if (!missing.empty()) {
        Made made = make(describe_layout(split_, missing, options_.placement), std::move(asked));
        layout.cost = made.cost;
        adopt(std::move(made.partitions));
    }
    known_.merge(keys);
    layouts_.push_back(std::move(layout));
    return layouts_.back().cost;
}

void StreamPool::add_remainder() {
    PartitionInfo asked;
    asked.is_remainder = true;
    asked.requested_sms = split_.remainder_sms();
    Made made = make({split_.describe_remainder()}, {asked});
    remainder_cost_ = made.cost;
    adopt(std::move(made.partitions));
    remainder_ = partitions_.size() - 1;
}

StreamPool::Made StreamPool::make(const std::vector<CUdevResourceDesc>& sms, std::vector<PartitionInfo> asked) const {
    Made made;
    CurrentContext current(primary_);
    const long long before = free_bytes();
    for (std::size_t i = 0; i < sms.size(); ++i) {
        made.partitions.push_back(
            std::make_unique<Partition>(split_.device().handle(), sms[i], std::move(asked[i]), options_.streams));
        const Partition& partition = *made.partitions.back();
        made.cost.num_contexts += 1;
        made.cost.num_streams += static_cast<int>(partition.streams().size());
        made.cost.creation_ms += partition.info().creation_ms;
    }
    made.cost.driver_bytes = before - free_bytes();
    current.close();
    return made;
}

void StreamPool::adopt(std::vector<std::unique_ptr<Partition>> made) {
    std::unordered_map<CUstream, Place> places;
    for (std::size_t i = 0; i < made.size(); ++i) {
        const std::vector<Stream>& streams = made[i]->streams();
        for (std::size_t j = 0; j < streams.size(); ++j) {
            places.emplace(streams[j].get(), Place{partitions_.size() + i, j});
        }
    }
    partitions_.reserve(partitions_.size() + made.size());
    places_.reserve(places_.size() + places.size());
    for (std::unique_ptr<Partition>& partition : made) partitions_.push_back(std::move(partition));
    places_.merge(places);
}

std::vector<PartitionInfo> StreamPool::partitions(const Lock&, int layout) const {
    std::vector<PartitionInfo> infos;
    for (const std::size_t partition : layout_at(layout).partitions) infos.push_back(partitions_[partition]->info());
    return infos;
}

std::optional<PartitionInfo> StreamPool::remainder(const Lock&) const {
    if (!remainder_) return std::nullopt;
    return partitions_[*remainder_]->info();
}

PoolStats StreamPool::stats(const Lock&) const {
    PoolStats stats;
    stats.creation_ms = remainder_cost_.creation_ms;
    stats.driver_bytes = remainder_cost_.driver_bytes;
    for (const Layout& layout : layouts_) {
        stats.layouts.push_back(layout.cost);
        stats.creation_ms += layout.cost.creation_ms;
        stats.driver_bytes += layout.cost.driver_bytes;
    }
    if (closed_) return stats;
    stats.num_contexts = static_cast<int>(partitions_.size());
    stats.num_streams = static_cast<int>(places_.size());
    for (const auto& partition : partitions_) stats.num_lent += partition->num_lent();
    return stats;
}

void StreamPool::close() {
    const Lock held = lock();
    if (closed_) return;
    const FirstError first = end_all();
    try {
        first.rethrow();
    } catch (const CudaError& error) {
        if (!driver_has_ended(error)) throw;
    }
}

FirstError StreamPool::end_all() noexcept {
    closed_ = true;
    FirstError first;
    std::optional<CurrentContext> current;
    first.run([&] { current.emplace(primary_); });
    for (const auto& partition : partitions_) partition->drain(first);
    for (const auto& partition : partitions_) partition->close_streams(first);
    first.run([&] {
        if (current) current->close();
    });
    for (const auto& partition : partitions_) partition->close_context(first);
    first.run([&] { primary_.close(); });
    return first;
}

}  // namespace mosaic
