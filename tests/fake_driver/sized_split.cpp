// cuDevSmResourceSplit, by the rules that cuda.h of CUDA 13.1 states: groups of the sizes asked for in one call,
// without rounding. The quirk other_sizes makes the first group two SMs smaller than promised.
#include <algorithm>

#include "resource.h"

namespace fake {
namespace {

constexpr unsigned kMaxCoscheduled = 32;

// How many SMs of a group are scheduled together; 0 for parameters that the driver refuses. A count is never rounded.
unsigned together_of(const GroupParams& params, const Hidden& whole) {
    const bool hopper = state().devices[static_cast<std::size_t>(whole.device)].major >= 9;
    for (const unsigned word : params.reserved) {
        if (word != 0) return 0;
    }
    const unsigned together = params.coscheduled ? params.coscheduled : hopper ? 8 : 2;
    const bool fits = params.sm_count >= 2 && params.sm_count <= whole.sms.count() && params.sm_count % together == 0;
    return params.flags == 0 && together % 2 == 0 && together <= (hopper ? kMaxCoscheduled : 2) && fits ? together : 0;
}

Result check_call(const Resource* result, unsigned groups, const Resource* input, const Resource* remainder,
                  unsigned flags, const GroupParams* params) {
    if (result == nullptr || input == nullptr || params == nullptr || groups == 0 || flags != 0) return kInvalidValue;
    if (input->type != kResourceTypeSm) return kInvalidResourceType;
    if (read(*input).source != Source::query) return kInvalidResourceConfiguration;
    if (remainder != nullptr && !is_zero(*remainder)) return kInvalidValue;
    return std::all_of(result, result + groups, is_zero) ? kSuccess : kInvalidValue;
}

Result cuDevSmResourceSplit(Resource* result, unsigned groups, const Resource* input, Resource* remainder,
                            unsigned flags, GroupParams* params) {
    FAKE_ENTER("cuDevSmResourceSplit");
    if (const Result bad = check_call(result, groups, input, remainder, flags, params)) return bad;
    const Hidden whole = read(*input);
    SmSet left = whole.sms;
    ++state().last_split;
    for (unsigned i = 0; i < groups; ++i) {
        const unsigned count = params[i].sm_count;
        const unsigned together = together_of(params[i], whole);
        if (together == 0) return kInvalidValue;
        if (count > reachable(left, together)) return kInvalidResourceConfiguration;
        write(&result[i], {Source::result, whole.device, state().last_split, take(left, count, together)}, together);
    }
    if (state().quirk == "other_sizes") result[0].sm.count -= 2;
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
