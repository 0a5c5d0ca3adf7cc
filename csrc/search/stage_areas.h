// How few slots x devices the modules of a stage need, by the stage's times. Nothing else of the machine counts here.
#pragma once

#include <cstdint>
#include <vector>

#include "search/problem.h"

namespace mosaic::search {

// A stage has two times: its slowest forward and its slowest backward, or, where the objective is the paper's sum, the
// slowest module and nothing. It costs the two together. What neighbours cost is left out, so real times are no less.
class StageAreas {
  public:
    explicit StageAreas(const Problem& problem);

    std::int64_t room() const { return room_; }
    // All that the two times can be, rising.
    const std::vector<Ns>& firsts() const { return firsts_; }
    const std::vector<Ns>& seconds() const { return seconds_; }

    // Modules of a set with an option of one of these first (second) times, given by the places of the least and the
    // largest.
    Mask with_first(Mask set, std::size_t low, std::size_t high) const { return with(first_owners_, set, low, high); }
    Mask with_second(Mask set, std::size_t low, std::size_t high) const { return with(second_owners_, set, low, high); }

    // The least area with which a module meets both times; more than the room where it cannot.
    std::int64_t area(int module, Ns first, Ns second) const;

    // The least that modules take side by side as far as area tells; kNever where they do not fit.
    Ns together(Mask set) const;

    // The least that a module takes alone; kNever where it fits on no device.
    Ns alone(int module) const { return alone_[static_cast<std::size_t>(module)]; }

    // Modules that one waits for, directly or not.
    Mask earlier(int module) const { return earlier_[static_cast<std::size_t>(module)]; }

    // Modules that cannot share a stage with one, since one waits for the other, directly or not.
    Mask apart(int module) const { return apart_[static_cast<std::size_t>(module)]; }

    // All of `earlier`, by module.
    const std::vector<Mask>& order() const { return earlier_; }

    // Makes modules wait for others than they do; `earlier` holds all that each waits for, directly or not.
    void set_order(std::vector<Mask> earlier);

    // Splits all modules into sets such that modules of different sets never share a stage. Every module of a set is
    // before or after all of another set, so each can be planned on its own.
    std::vector<Mask> parts() const;

    // Splits a set into chains: no two modules of one share a stage. Few chains make sharp bounds.
    std::vector<std::vector<int>> chains(Mask set) const;

  private:
    class Frontier;
    struct Need {
        std::int64_t area;
        Ns first;
        Ns second;
    };

    void find_order(const Problem& problem);
    void find_owners();
    static Mask with(const std::vector<Mask>& owners, Mask set, std::size_t low, std::size_t high);

    std::int64_t room_;
    std::vector<std::vector<Need>> needs_;  // by module, rising area, none of them dominated
    std::vector<Ns> firsts_;
    std::vector<Ns> seconds_;
    std::vector<Mask> first_owners_;  // by place of a time: modules that have it, whose area may change there
    std::vector<Mask> second_owners_;
    std::vector<std::size_t> least_first_;  // by module: place of its shortest time
    std::vector<std::size_t> least_second_;
    std::vector<Ns> alone_;
    std::vector<Mask> earlier_;
    std::vector<Mask> apart_;
};

}  // namespace mosaic::search
