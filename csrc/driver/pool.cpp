#include "pool.h"

#include "probe.h"

namespace mosaic {
namespace {

// Of the current context's device.
long long free_bytes() {
    std::size_t free = 0;
    std::size_t total = 0;
    MOSAIC_CALL(cuMemGetInfo, &free, &total);
    return static_cast<long long>(free);
}

// Checks each partition as SlotSplit::select does, and that no slot is in two of them.
std::vector<SlotSet> check_layout(const SlotSplit& split, const LayoutSlots& layout) {
    if (layout.empty()) {
        throw std::invalid_argument("layout=[] has no partition; use one or more, such as [[0]]");
    }
    std::vector<SlotSet> sets;
    std::map<int, std::size_t> owner;
    for (const std::vector<int>& slots : layout) {
        sets.push_back(split.select(slots));
        for (const int slot : sets.back().slots) {
            const auto [held, is_new] = owner.emplace(slot, sets.size() - 1);
            if (!is_new) {
                throw std::invalid_argument("slot " + std::to_string(slot) + " is in partitions " +
                                            std::to_string(held->second) + " and " + std::to_string(sets.size() - 1) +
                                            ", but partitions of a layout are disjoint; remove it from one, or "
                                            "make two layouts");
            }
        }
    }
    return sets;
}

}  // namespace

StreamPool::StreamPool(const Device& device, const std::vector<LayoutSlots>& layouts)
    : split_(device), primary_(device.handle()) {
    for (const LayoutSlots& layout : layouts) add(layout);
}

StreamPool::~StreamPool() noexcept {
    // In a forked child the members know by themselves that they are not to call the driver.
    if (origin_.is_here() && !closed_) static_cast<void>(end_all());
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

// Whatever may fail comes before the first change of a member, so a failure leaves the pool as it was.
LayoutCost StreamPool::add(const LayoutSlots& slots) {
    const std::vector<SlotSet> sets = check_layout(split_, slots);
    Layout layout;
    std::vector<SlotSet> missing;
    std::map<std::vector<int>, std::size_t> keys;
    for (const SlotSet& set : sets) {
        const auto found = known_.find(set.slots);
        layout.partitions.push_back(found != known_.end() ? found->second : partitions_.size() + missing.size());
        if (found != known_.end()) continue;
        keys.emplace(set.slots, layout.partitions.back());
        missing.push_back(set);
    }
    layouts_.reserve(layouts_.size() + 1);
    if (!missing.empty()) {
        Made made = make(missing);
        layout.cost = made.cost;
        adopt(std::move(made.partitions));
    }
    known_.merge(keys);
    layouts_.push_back(std::move(layout));
    return layouts_.back().cost;
}

StreamPool::Made StreamPool::make(const std::vector<SlotSet>& sets) const {
    std::vector<CUdevResourceDesc> sms;
    for (const SlotSet& set : sets) sms.push_back(split_.describe(set));
    Made made;
    CurrentContext current(primary_);
    const long long before = free_bytes();
    for (std::size_t i = 0; i < sets.size(); ++i) {
        PartitionInfo asked{sets[i].slots, sets[i].num_sms, 0, std::nullopt, 0};
        made.partitions.push_back(std::make_unique<Partition>(split_.device().handle(), sms[i], std::move(asked)));
        made.cost.num_contexts += 1;
        made.cost.creation_ms += made.partitions.back()->info().creation_ms;
    }
    made.cost.driver_bytes = before - free_bytes();
    current.close();
    return made;
}

void StreamPool::adopt(std::vector<std::unique_ptr<Partition>> made) {
    std::unordered_map<CUstream, std::size_t> found;
    for (std::size_t i = 0; i < made.size(); ++i) found.emplace(made[i]->stream(), partitions_.size() + i);
    partitions_.reserve(partitions_.size() + made.size());
    partition_of_.reserve(partition_of_.size() + found.size());
    for (std::unique_ptr<Partition>& partition : made) partitions_.push_back(std::move(partition));
    partition_of_.merge(found);
}

std::vector<PartitionInfo> StreamPool::partitions(const Lock&, int layout) const {
    std::vector<PartitionInfo> infos;
    for (const std::size_t partition : layout_at(layout).partitions) infos.push_back(partitions_[partition]->info());
    return infos;
}

const StreamPool::Layout& StreamPool::layout_at(int layout) const {
    if (layout >= 0 && static_cast<std::size_t>(layout) < layouts_.size()) {
        return layouts_[static_cast<std::size_t>(layout)];
    }
    throw std::invalid_argument("layout=" + std::to_string(layout) + " is none of the " +
                                std::to_string(layouts_.size()) + " layouts that were added; count from 0");
}

CUstream StreamPool::lend(const Lock&, int layout, int partition) {
    require_open();
    const Layout& chosen = layout_at(layout);
    if (partition < 0 || static_cast<std::size_t>(partition) >= chosen.partitions.size()) {
        throw std::invalid_argument("partition=" + std::to_string(partition) + " is none of the " +
                                    std::to_string(chosen.partitions.size()) + " partitions of layout " +
                                    std::to_string(layout) + "; count from 0");
    }
    return partitions_[chosen.partitions[static_cast<std::size_t>(partition)]]->lend();
}

void StreamPool::give_back(const Lock&, CUstream stream) {
    require_open();
    const auto found = partition_of_.find(stream);
    if (found == partition_of_.end() || !partitions_[found->second]->give_back()) {
        throw std::invalid_argument("stream=" + std::to_string(reinterpret_cast<std::uintptr_t>(stream)) +
                                    " is not lent by this pool; return each lent stream once");
    }
}

void StreamPool::verify(const std::string& image) {
    const Lock held = lock();
    require_open();
    CurrentContext current(primary_);
    Probe probe(split_.device(), image);
    std::vector<std::vector<int>> seen;
    for (const auto& partition : partitions_) {
        Stream extra = partition->make_extra_stream();
        seen.push_back(probe.run(extra.get()));
        extra.close();
    }
    probe.close();
    current.close();
    for (std::size_t i = 0; i < seen.size(); ++i) partitions_[i]->set_sm_ids(std::move(seen[i]));
}

PoolStats StreamPool::stats(const Lock&) const {
    PoolStats stats;
    for (const Layout& layout : layouts_) {
        stats.layouts.push_back(layout.cost);
        stats.creation_ms += layout.cost.creation_ms;
        stats.driver_bytes += layout.cost.driver_bytes;
    }
    if (closed_) return stats;
    stats.num_contexts = static_cast<int>(partitions_.size());
    for (const auto& partition : partitions_) stats.num_lent += partition->is_lent() ? 1 : 0;
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
    for (const auto& partition : partitions_) partition->close_stream(first);
    first.run([&] {
        if (current) current->close();
    });
    for (const auto& partition : partitions_) partition->close_context(first);
    first.run([&] { primary_.close(); });
    return first;
}

}  // namespace mosaic
