// SM resources: the split by count and descriptors, by the rules that cuda.h and the CUDA programming guide
// (section 4.6) state. Stricter than the driver in one thing: outputs have to be zeroed by the caller, since
// CUDA 13.1 took fields out of what was padding in 13.0.
//
// MOSAIC_FAKE_QUIRK makes it a driver that breaks its word: fewer_groups, uneven_groups, too_many_sms, no_groups,
// overlapping_groups (each group but the first has an SM of the one before in place of its own), kernels_spread
// and its like (launch.cpp).
//
// MOSAIC_FAKE_CLUSTERS=18,16,... gives the device GPCs of so many SMs; without it there is one, of all SMs. Then splits
// make "fewer groups [...] than purely dividing the total SM count by the minCount due to cluster requirements"
// (cuda.h, cuDevSmResourceSplitByCount), some multiples of 8 cannot be reached, and "the SM identifier numbering is not
// guaranteed to be contiguous" (PTX ISA, %smid): pairs of SMs are dealt to the GPCs in turn, and full GPCs leave gaps.
#include <algorithm>
#include <cstring>

#include "resource.h"

namespace fake {
namespace {

constexpr int kMergesNeedAlignment = 13010;

struct Rule {
    unsigned min_partition_size;
    unsigned alignment;
};

// Minimum and alignment by compute capability, from cuda.h of CUDA 13.0.
Rule rule_of(const FakeDevice& device) {
    if (device.major >= 9) return {8, 8};
    if (device.major == 8) return {4, 2};
    return {2, 2};
}

}  // namespace

void write(Resource* out, const Hidden& hidden, unsigned alignment) {
    const Rule rule = rule_of(state().devices[static_cast<std::size_t>(hidden.device)]);
    *out = Resource{};
    out->type = kResourceTypeSm;
    out->sm.count = static_cast<unsigned>(hidden.sms.count());
    if (state().version >= 13000) {  // older drivers know only the count
        out->sm.min_partition_size = rule.min_partition_size;
        out->sm.coscheduled_alignment = alignment;
    }
    std::memcpy(out->hidden, &hidden, sizeof hidden);
}

Hidden read(const Resource& resource) {
    Hidden hidden{};
    std::memcpy(static_cast<void*>(&hidden), resource.hidden, sizeof hidden);
    return hidden;
}

bool is_zero(const Resource& resource) {
    static const Resource zero{};
    return std::memcmp(&resource, &zero, sizeof zero) == 0;
}

namespace {

std::size_t num_gpcs() { return std::max<std::size_t>(1, state().clusters.size()); }

SmSet gpc_of(const SmSet& from, std::size_t gpc) {
    SmSet part;
    for (std::size_t sm = 0; sm < kMaxSms; ++sm) part[sm] = from[sm] && sm / 2 % num_gpcs() == gpc;
    return part;
}

}  // namespace

std::vector<unsigned> sm_ids(int device) {
    const unsigned num_sms = state().devices[static_cast<std::size_t>(device)].num_sms;
    std::vector<unsigned> ids;
    std::vector<unsigned> left = state().clusters.empty() ? std::vector<unsigned>{num_sms} : state().clusters;
    for (unsigned id = 0; ids.size() < num_sms; ++id) {
        unsigned& room = left[id / 2 % left.size()];
        if (room > 0) ids.push_back(id);
        if (room > 0) --room;
    }
    return ids;
}

namespace {

// How many SMs of a set can be had in bundles of `together`, each bundle out of one GPC.
unsigned reachable(const SmSet& from, unsigned together) {
    unsigned sum = 0;
    for (std::size_t gpc = 0; gpc < num_gpcs(); ++gpc) {
        sum += static_cast<unsigned>(gpc_of(from, gpc).count()) / together * together;
    }
    return sum;
}

// Takes so many SMs out of `from`, in such bundles, the lowest first, as the driver was seen to do.
SmSet take(SmSet& from, unsigned count, unsigned together = 1) {
    SmSet taken;
    for (std::size_t gpc = 0; gpc < num_gpcs(); ++gpc) {
        const SmSet part = gpc_of(from, gpc);
        unsigned room = static_cast<unsigned>(part.count()) / together * together;
        for (std::size_t sm = 0; sm < kMaxSms && room > 0 && taken.count() < count; ++sm) {
            if (!part[sm]) continue;
            taken[sm] = true;
            --room;
        }
    }
    from &= ~taken;
    return taken;
}

Result cuDeviceGetDevResource(int device, Resource* out, int type) {
    FAKE_ENTER("cuDeviceGetDevResource");
    if (!state().has(device)) return kInvalidDevice;
    if (type != kResourceTypeSm) return kInvalidResourceType;
    if (!is_zero(*out)) return kInvalidValue;
    describe_sms(out, device, sm_ids(device));
    return kSuccess;
}

// Writes `made` groups of `size` SMs and returns what is left.
SmSet write_groups(Resource* result, unsigned made, unsigned size, unsigned alignment, const Hidden& whole) {
    SmSet left = whole.sms;
    const bool overlapping = state().quirk == "overlapping_groups";
    std::size_t highest = 0;  // SM of the group before
    for (unsigned group = 0; group < made; ++group) {
        SmSet sms = take(left, size, alignment);
        if (overlapping && group > 0) {
            take(sms, 1);
            sms[highest] = true;
        }
        write(&result[group], {Source::result, whole.device, state().last_split, sms}, alignment);
        for (highest = kMaxSms - 1; !sms[highest];) --highest;
    }
    if (state().quirk == "uneven_groups") result[made - 1].sm.count -= 1;
    return left;
}

Result check_split(const Resource* result, const unsigned* groups, const Resource* input, const Resource* remainder,
                   unsigned flags, unsigned min_count) {
    if (groups == nullptr || input == nullptr) return kInvalidValue;
    if (input->type != kResourceTypeSm) return kInvalidResourceType;
    const Hidden whole = read(*input);
    if (whole.source != Source::query) return kInvalidResourceConfiguration;
    if (!state().has(whole.device) || min_count > input->sm.count) return kInvalidValue;
    if (flags != 0) return kInvalidValue;
    if (remainder != nullptr && !is_zero(*remainder)) return kInvalidValue;
    if (result == nullptr) return kSuccess;
    if (*groups == 0) return kInvalidValue;
    return std::all_of(result, result + *groups, is_zero) ? kSuccess : kInvalidValue;
}

Result cuDevSmResourceSplitByCount(Resource* result, unsigned* groups, const Resource* input, Resource* remainder,
                                   unsigned flags, unsigned min_count) {
    FAKE_ENTER("cuDevSmResourceSplitByCount");
    if (const Result bad = check_split(result, groups, input, remainder, flags, min_count)) return bad;
    const Hidden whole = read(*input);
    const Rule rule = rule_of(state().devices[static_cast<std::size_t>(whole.device)]);
    const unsigned aligned = (min_count + rule.alignment - 1) / rule.alignment * rule.alignment;
    const unsigned size = std::max(rule.min_partition_size, aligned);
    const unsigned possible = state().quirk == "no_groups" ? 0 : reachable(whole.sms, rule.alignment) / size;
    if (result == nullptr) {
        *groups = possible;
        return kSuccess;
    }
    if (possible == 0) return kInvalidResourceConfiguration;
    unsigned made = std::min(*groups, possible);
    if (state().quirk == "fewer_groups") --made;
    ++state().last_split;
    const SmSet left = write_groups(result, made, size, rule.alignment, whole);
    *groups = made;
    if (remainder != nullptr && left.any()) {
        write(remainder, {Source::remainder, whole.device, state().last_split, left},
              remainder_alignment(rule.alignment));
        if (state().quirk == "too_many_sms") remainder->sm.count += 1;
    }
    return kSuccess;
}

Result cuDevResourceGenerateDesc(Descriptor** out, Resource* resources, unsigned count) {
    FAKE_ENTER("cuDevResourceGenerateDesc");
    if (out == nullptr || resources == nullptr || count == 0) return kInvalidValue;
    const Hidden first = read(resources[0]);
    const unsigned alignment = resources[0].sm.coscheduled_alignment;
    SmSet all;
    for (unsigned i = 0; i < count; ++i) {
        if (resources[i].type != kResourceTypeSm) return kInvalidResourceType;
        const Hidden next = read(resources[i]);
        const bool same_split = next.device == first.device && next.split == first.split;
        if (count > 1 && (!same_split || next.source == Source::query)) return kInvalidResourceConfiguration;
        // "They must be outputs from the same split API instance and have the same smCoscheduledAlignment [...] values,
        // otherwise CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION is returned" (cuda.h of 13.1 and later).
        const bool aligned =
            state().version < kMergesNeedAlignment || resources[i].sm.coscheduled_alignment == alignment;
        if (!aligned) return kInvalidResourceConfiguration;
        if ((all & next.sms).any() && state().quirk != "overlapping_groups") return kInvalidResourceConfiguration;
        all |= next.sms;
    }
    auto made = std::make_unique<Descriptor>();
    made->device = first.device;
    for (unsigned sm = 0; sm < kMaxSms; ++sm) {
        if (all[sm]) made->sms.push_back(sm);
    }
    *out = keep(state().descriptors, std::move(made));  // valid for the lifetime of the process
    return kSuccess;
}

}  // namespace

void describe_sms(Resource* out, int device, const std::vector<unsigned>& sms) {
    Hidden hidden{Source::query, device, 0, {}};
    for (const unsigned sm : sms) hidden.sms[sm] = true;
    write(out, hidden, rule_of(state().devices[static_cast<std::size_t>(device)]).alignment);
}

// "The number of streaming multiprocessors in this resource that are guaranteed to be co-scheduled on the same GPU
// processing cluster. smCount will be a multiple of this value" (cuda.h of 13.1, CUdevSmResource): what a split leaves
// over promises nothing beyond pairs. In 13.0 the field is the device's own.
unsigned remainder_alignment(unsigned alignment) { return state().version < kMergesNeedAlignment ? alignment : 2; }

const std::vector<Function>& split_functions() {
    static const std::vector<Function> functions = {
        {"cuDeviceGetDevResource", 12040, address_of(&cuDeviceGetDevResource)},
        {"cuDevSmResourceSplitByCount", 12040, address_of(&cuDevSmResourceSplitByCount)},
        {"cuDevResourceGenerateDesc", 12040, address_of(&cuDevResourceGenerateDesc)},
    };
    return functions;
}

}  // namespace fake
