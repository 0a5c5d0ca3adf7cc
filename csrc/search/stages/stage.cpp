#include "search/stages/stage.h"

#include <algorithm>

#include "search/stages/interference.h"

namespace mosaic::search {

void time_stage(const Problem& problem, Stage& stage) {
    stage.forward = stage.backward = stage.latency = 0;
    for (const Placed& own : stage.placed) {
        const Option& option =
            problem.modules[static_cast<std::size_t>(own.module)].options[static_cast<std::size_t>(own.option)];
        Extras worst;
        const std::size_t num_met = problem.is_disturbed() ? own.devices.size() : 0;  // devices with neighbours
        for (std::size_t i = 0; i < num_met; ++i) {
            const int device = own.devices[i];
            Resident others[kMaxModules];
            int count = 0;
            for (const Placed& other : stage.placed) {
                if (other.module != own.module &&
                    std::binary_search(other.devices.begin(), other.devices.end(), device)) {
                    others[count++] = {other.module, other.option};
                }
            }
            const Resident self{own.module, own.option};
            worst.raise_to(extra(problem, 0, self, others, count), extra(problem, 1, self, others, count));
        }
        stage.forward = std::max(stage.forward, option.forward + worst.forward);
        stage.backward = std::max(stage.backward, option.backward + worst.backward);
        stage.latency = std::max(stage.latency, option.latency() + worst.both);
    }
}

}  // namespace mosaic::search
