// Makes a placement that fits by slots fit by memory.
#pragma once

#include <vector>

#include "search/stages/packing.h"

namespace mosaic::search {

// Two devices may exchange modules for others that both have slots for. That is done for as long as it takes something
// off what devices lack of memory.
class MemoryExchange {
  public:
    explicit MemoryExchange(const Problem& problem) : problem_(problem) {}

    // Returns whether every device then holds its modules. Each has its devices, by rising number, and gets its slots;
    // if not, `placed` is of no use.
    bool settle(std::vector<Placed>& placed);

  private:
    struct Group {  // some of the modules of a device
        Mask items = 0;
        int slots = 0;
        std::int64_t memory = 0;
    };

    const Option& option_of(std::size_t item, const std::vector<Placed>& placed) const;
    std::int64_t lack(std::int64_t used) const {
        return used > problem_.machine.memory ? used - problem_.machine.memory : 0;
    }
    bool relieve(std::size_t device, const std::vector<Placed>& placed);
    void list(std::size_t device, const std::vector<Placed>& placed, std::vector<Group>& groups) const;
    void write(std::vector<Placed>& placed) const;

    const Problem& problem_;
    std::vector<Mask> held_;          // by device: places in `placed`
    std::vector<std::int64_t> used_;  // bytes, by device
    std::vector<int> free_;           // slots, by device
    std::vector<Group> own_;          // scratch
    std::vector<Group> others_;
};

}  // namespace mosaic::search
