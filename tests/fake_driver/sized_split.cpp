// cuDevSmResourceSplit, by the rules that cuda.h of CUDA 13.1 states: groups of the sizes asked for in one call,
// without rounding. The quirk other_sizes makes the first group two SMs smaller than promised.
#include "resource.h"

namespace fake {
namespace {

constexpr unsigned kMaxCoscheduled = 32;

struct Group {
    unsigned count;
    unsigned coscheduled;
    bool backfill;
};

bool is_hopper(const Hidden& whole) { return state().devices[static_cast<std::size_t>(whole.device)].major >= 9; }

Result check_params(const GroupParams& params, const Hidden& whole, Group* group) {
    const bool hopper = is_hopper(whole);
    for (const unsigned word : params.reserved) {
        if (word != 0) return kInvalidValue;
    }
    if (params.flags & ~kBackfill) return kInvalidValue;
    const unsigned most = hopper ? kMaxCoscheduled : 2;
    if (params.coscheduled % 2 != 0 || params.coscheduled > most) return kInvalidValue;
    const unsigned default_coscheduled = hopper ? 8 : 2;
    *group = {params.sm_count, params.coscheduled ? params.coscheduled : default_coscheduled,
              (params.flags & kBackfill) != 0};
    if (group->count == 0) return kSuccess;
    if (group->count < 2 || group->count > whole.sms.count() || group->count % 2 != 0) return kInvalidValue;
    // A count is never rounded.
    return group->backfill || group->count % group->coscheduled == 0 ? kSuccess : kInvalidValue;
}

// Assigns SMs to one group; `left` loses them. A count of 0 discovers what is possible.
Result assign(Group& group, SmSet& left, SmSet* sms) {
    const unsigned available = static_cast<unsigned>(left.count());
    const unsigned structured = reachable(left, group.coscheduled);
    if (group.count == 0) group.count = group.backfill ? available / 2 * 2 : structured;
    if (group.count > (group.backfill ? available : structured)) return kInvalidResourceConfiguration;
    *sms = take(left, group.count, group.backfill ? 1 : group.coscheduled);
    return kSuccess;
}

Result check_call(const Resource* result, unsigned groups, const Resource* input, const Resource* remainder,
                  unsigned flags, const GroupParams* params) {
    if (input == nullptr || params == nullptr || groups == 0 || flags != 0) return kInvalidValue;
    if (input->type != kResourceTypeSm) return kInvalidResourceType;
    if (read(*input).source != Source::query) return kInvalidResourceConfiguration;
    if (remainder != nullptr && !is_zero(*remainder)) return kInvalidValue;
    for (unsigned i = 0; i < groups; ++i) {
        if (result != nullptr && !is_zero(result[i])) return kInvalidValue;
        // Without results there is only discovery.
        if (result == nullptr && params[i].sm_count != 0) return kInvalidResourceConfiguration;
    }
    return kSuccess;
}

Result cuDevSmResourceSplit(Resource* result, unsigned groups, const Resource* input, Resource* remainder,
                            unsigned flags, GroupParams* params) {
    FAKE_ENTER("cuDevSmResourceSplit");
    if (const Result bad = check_call(result, groups, input, remainder, flags, params)) return bad;
    const Hidden whole = read(*input);
    SmSet left = whole.sms;
    ++state().last_split;
    for (unsigned i = 0; i < groups; ++i) {
        Group group{};
        SmSet sms;
        if (const Result bad = check_params(params[i], whole, &group)) return bad;
        if (const Result bad = assign(group, left, &sms)) return bad;
        if (result != nullptr && group.count < group.coscheduled) return kInvalidResourceConfiguration;
        params[i].sm_count = group.count;
        if (result != nullptr) {
            write(&result[i], {Source::result, whole.device, state().last_split, sms}, group.coscheduled);
        }
    }
    if (result != nullptr && state().quirk == "other_sizes") result[0].sm.count -= 2;
    if (remainder != nullptr && left.any()) {
        write(remainder, {Source::remainder, whole.device, state().last_split, left}, remainder_alignment(2));
    }
    return kSuccess;
}

}  // namespace

const std::vector<Function>& sized_split_functions() {
    static const std::vector<Function> functions = {
        {"cuDevSmResourceSplit", 13010, address_of(&cuDevSmResourceSplit)},
    };
    return functions;
}

}  // namespace fake
