#include "placement.h"

#include <map>

namespace mosaic {
namespace {

// One call for the whole layout, since two calls may give out the same SMs.
std::vector<CUdevResource> split_by_size(const SlotSplit& split, const std::vector<SlotSet>& sets) {
    const CUdevResource whole = split.device().sm_resource();
    std::vector<CU_DEV_SM_RESOURCE_GROUP_PARAMS> asked(sets.size(), CU_DEV_SM_RESOURCE_GROUP_PARAMS{});
    for (std::size_t i = 0; i < sets.size(); ++i) {
        asked[i].smCount = sets[i].num_sms;
        // 0 is the device's default, which keeps its largest promised clusters.
        asked[i].coscheduledSmCount = split.fine() ? 2 : 0;
    }
    std::vector<CUdevResource> groups(sets.size(), CUdevResource{});
    CUdevResource remainder{};
    MOSAIC_CALL(cuDevSmResourceSplit, groups.data(), static_cast<unsigned>(groups.size()), &whole, &remainder, 0u,
                asked.data());
    for (std::size_t i = 0; i < sets.size(); ++i) {
        if (groups[i].type != CU_DEV_RESOURCE_TYPE_SM || groups[i].sm.smCount != sets[i].num_sms) {
            throw_broken("cuDevSmResourceSplit", "gave " + std::to_string(groups[i].sm.smCount) + " SMs where " +
                                                     std::to_string(sets[i].num_sms) + " were asked for");
        }
    }
    return groups;
}

}  // namespace

Placement parse_placement(const std::string& text) {
    if (text == "merged") return Placement::merged;
    if (text == "split") return Placement::split;
    throw std::invalid_argument("placement='" + text + "' is not known; use 'merged' or 'split'");
}

const char* text(Placement placement) { return placement == Placement::merged ? "merged" : "split"; }

void require_placement(Placement placement) {
    if (placement == Placement::split && driver().functions().cuDevSmResourceSplit == nullptr) {
        throw_missing("cuDevSmResourceSplit");
    }
}

std::vector<SlotSet> check_layout(const SlotSplit& split, const LayoutSlots& layout) {
    if (layout.empty()) {
        throw std::invalid_argument("layout=[] has no partition; name the slots of one at least, such as [[0]]");
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
                                            ", but partitions of one layout are disjoint; give it to one of them, or "
                                            "make two layouts");
            }
        }
    }
    return sets;
}

std::vector<CUdevResourceDesc> describe_layout(const SlotSplit& split, const std::vector<SlotSet>& sets,
                                               Placement placement) {
    std::vector<CUdevResourceDesc> descriptors;
    descriptors.reserve(sets.size());
    if (placement == Placement::merged) {
        for (const SlotSet& set : sets) descriptors.push_back(split.describe(set));
    } else {
        for (const CUdevResource& group : split_by_size(split, sets)) descriptors.push_back(describe({group}));
    }
    return descriptors;
}

}  // namespace mosaic
