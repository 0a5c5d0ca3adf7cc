// What a pool does in the step, lending by look-up, and the probe on each of its partitions.
#include "pool.h"
#include "probe.h"

namespace mosaic {
namespace {

std::string joined(const std::vector<int>& numbers) {
    std::string text;
    for (const int number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
    return text;
}

std::string name_of(const PartitionInfo& info) {
    return info.is_remainder ? "the remainder" : "the partition of slots [" + joined(info.slots) + "]";
}

}  // namespace

const StreamPool::Layout& StreamPool::layout_at(int layout) const {
    if (layout >= 0 && static_cast<std::size_t>(layout) < layouts_.size()) {
        return layouts_[static_cast<std::size_t>(layout)];
    }
    throw std::invalid_argument("layout=" + std::to_string(layout) + " is none of the " +
                                std::to_string(layouts_.size()) + " layouts that were added; count from 0");
}

CUstream StreamPool::lend(const Lock&, int layout, int partition, int priority, bool shared) {
    require_open();
    const Layout& chosen = layout_at(layout);
    if (partition < 0 || static_cast<std::size_t>(partition) >= chosen.partitions.size()) {
        throw std::invalid_argument("partition=" + std::to_string(partition) + " is none of the " +
                                    std::to_string(chosen.partitions.size()) + " partitions of layout " +
                                    std::to_string(layout) + "; count from 0");
    }
    return lend_from(*partitions_[chosen.partitions[static_cast<std::size_t>(partition)]], priority, shared);
}

CUstream StreamPool::lend_remainder(const Lock&, int priority, bool shared) {
    require_open();
    if (!remainder_) {
        throw std::invalid_argument("this pool was made without the remainder; make it with remainder=True");
    }
    return lend_from(*partitions_[*remainder_], priority, shared);
}

CUstream StreamPool::lend_from(Partition& partition, int priority, bool shared) {
    const std::size_t row = options_.streams.row_of(priority);
    if (const std::optional<std::size_t> stream = partition.lend(row, shared)) {
        return partition.streams()[*stream].get();
    }
    const int made = options_.streams.streams_per_partition;
    throw Unavailable(
        "all streams of " + name_of(partition.info()) + " with priority " + std::to_string(priority) + " are lent",
        std::to_string(made) + " of " + std::to_string(made) + " lent",
        "one given back before, or a pool made with streams_per_partition=" + std::to_string(made + 1));
}

void StreamPool::give_back(const Lock&, CUstream stream) {
    require_open();
    const auto found = places_.find(stream);
    if (found == places_.end() || !partitions_[found->second.partition]->give_back(found->second.stream)) {
        throw std::invalid_argument("stream=" + std::to_string(reinterpret_cast<std::uintptr_t>(stream)) +
                                    " is not lent by this pool; give back what lend returned, once");
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

}  // namespace mosaic
