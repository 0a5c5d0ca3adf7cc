// Numbers drawn at random, the same on every machine.
#pragma once

#include <cstdint>
#include <random>

namespace mosaic::search::pipeline {

class Random {
  public:
    explicit Random(std::uint64_t seed) : generator_(seed) {}
    // From 0 to n - 1.
    int below(int n) { return static_cast<int>((generator_() >> 32) * static_cast<std::uint64_t>(n) >> 32); }

  private:
    std::mt19937_64 generator_;
};

}  // namespace mosaic::search::pipeline
