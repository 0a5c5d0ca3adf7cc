#include "search/stages/known.h"

#include <algorithm>

namespace mosaic::search {
namespace {

// Sets that are handed on from search to search; beyond, only those that the latest one asked for.
constexpr std::size_t kMaxKept = 200'000;

bool is_same(const Option& first, const Option& second) {
    return first.degree == second.degree && first.quota == second.quota && first.forward == second.forward &&
           first.backward == second.backward && first.memory == second.memory &&
           first.forward_bandwidth == second.forward_bandwidth &&
           first.backward_bandwidth == second.backward_bandwidth &&
           std::equal(first.idle, first.idle + 2, second.idle) && std::equal(first.cap, first.cap + 2, second.cap);
}

bool is_same(const Module& first, const Module& second) {
    if (first.options.is_shared_with(second.options)) return true;
    return std::equal(first.options.begin(), first.options.end(), second.options.begin(), second.options.end(),
                      [](const Option& a, const Option& b) { return is_same(a, b); });
}

// Whether one thread launches two modules of different problems in the same time; where either knows of none, yes.
bool is_launched_alike(const Problem& first, std::size_t m, const Problem& second, std::size_t n) {
    const auto& before = first.interference.launches;
    const auto& now = second.interference.launches;
    return !first.is_launched() || !second.is_launched() || (before[0][m] == now[0][n] && before[1][m] == now[1][n]);
}

// Whether stages cost the same wherever the modules are the same and disturb each other alike.
bool is_comparable(const Problem& first, const Problem& second) {
    const Machine& a = first.machine;
    const Machine& b = second.machine;
    const Interference& c = first.interference;
    const Interference& d = second.interference;
    return a.num_devices == b.num_devices && a.num_slots == b.num_slots && a.memory == b.memory &&
           first.objective == second.objective && c.form == d.form && std::equal(c.e1, c.e1 + 2, d.e1) &&
           std::equal(c.e2, c.e2 + 2, d.e2) && std::equal(c.e3, c.e3 + 2, d.e3) &&
           std::equal(c.capacity, c.capacity + 2, d.capacity) && std::equal(c.fairness, c.fairness + 2, d.fairness) &&
           std::equal(c.cache, c.cache + 2, d.cache) && first.is_launched() == second.is_launched();
}

// Extra of module m, option o, beside neighbour n at a quota; a row may be empty.
Ns pair_extra(const Problem& problem, int phase, std::size_t m, std::size_t o, int n, int quota) {
    const std::vector<Ns>& row = problem.interference.pairs[phase][m][o];
    const auto at = static_cast<std::size_t>(n) * static_cast<std::size_t>(problem.machine.num_slots + 1);
    return row.empty() ? 0 : row[at + static_cast<std::size_t>(quota)];
}

bool disturbs_alike(const Known& known, const Problem& problem, const std::vector<int>& places) {
    if (problem.interference.form != Form::pairwise) return true;
    for (std::size_t m = 0; m < places.size(); ++m) {
        for (std::size_t n = 0; n < places.size(); ++n) {
            if (m == n || places[m] < 0 || places[n] < 0) continue;
            const auto before = static_cast<std::size_t>(places[m]);
            for (std::size_t o = 0; o < problem.modules[m].options.size(); ++o) {
                for (int at = 0; at < 2 * (problem.machine.num_slots + 1); ++at) {
                    const int quota = at / 2;
                    if (pair_extra(problem, at % 2, m, o, static_cast<int>(n), quota) !=
                        pair_extra(known.problem, at % 2, before, o, places[n], quota)) {
                        return false;
                    }
                }
            }
        }
    }
    return true;
}

// The index that each module of the earlier problem has now; -1 where it is gone or not the same any more.
std::vector<int> find_now(const Known& known, const Problem& problem, std::vector<int>& places) {
    std::vector<int> now(known.problem.modules.size(), -1);
    for (std::size_t m = 0; m < places.size(); ++m) {
        if (places[m] < 0) continue;
        const auto before = static_cast<std::size_t>(places[m]);
        if (before >= now.size() || now[before] >= 0) {
            throw std::invalid_argument("places name a module of the earlier problem that is not there, or one twice");
        }
        if (is_same(problem.modules[m], known.problem.modules[before]) &&
            is_launched_alike(known.problem, before, problem, m)) {
            now[before] = static_cast<int>(m);
        } else {
            places[m] = -1;
        }
    }
    return now;
}

}  // namespace

Carried::Carried(const Known* known, const Problem& problem, const std::vector<int>& places) {
    if (known == nullptr) return;
    if (places.size() != problem.modules.size()) {
        throw std::invalid_argument("places has " + std::to_string(places.size()) + " entries; give one for each of " +
                                    std::to_string(problem.size()) + " modules");
    }
    before_ = places;
    now_ = find_now(*known, problem, before_);
    if (is_comparable(known->problem, problem) && disturbs_alike(*known, problem, before_)) known_ = known;
}

std::optional<Mask> Carried::set_now(Mask earlier) const {
    Mask now = 0;
    bool is_there = true;
    each(earlier, [&](int m) {
        const int index = now_[static_cast<std::size_t>(m)];
        is_there = is_there && index >= 0;
        if (is_there) now |= Mask{1} << index;
    });
    return is_there ? std::optional<Mask>(now) : std::nullopt;
}

std::optional<StageValue> Carried::find(Mask set) const {
    if (known_ == nullptr) return std::nullopt;
    Mask earlier = 0;
    bool is_there = true;
    each(set, [&](int m) {
        const int index = before_[static_cast<std::size_t>(m)];
        is_there = is_there && index >= 0;
        if (is_there) earlier |= Mask{1} << index;
    });
    if (!is_there) return std::nullopt;
    const auto found = known_->values.find(earlier);
    if (found == known_->values.end() || found->second.gave_up) return std::nullopt;
    return value_now(found->second);
}

StageValue Carried::value_now(const StageValue& earlier) const {
    StageValue value = earlier;
    for (Placed& placed : value.stage.placed) placed.module = now_[static_cast<std::size_t>(placed.module)];
    return value;
}

void Carried::add_to(StageValues& values) const {
    if (known_ == nullptr || known_->values.size() + values.size() > kMaxKept) return;
    for (const auto& [earlier, value] : known_->values) {
        const auto set = set_now(earlier);
        if (!set) continue;
        const auto [place, is_new] = values.try_emplace(*set);
        if (is_new) place->second = value_now(value);
    }
}

}  // namespace mosaic::search
