// Rows of bits in one piece of memory, each with its first set bit found fast.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace mosaic::search::pipeline {

class BitRows {
  public:
    void resize(const std::vector<int>& sizes) {
        first_word_.assign(1, 0);
        for (const int size : sizes) first_word_.push_back(first_word_.back() + (size + 63) / 64);
        words_.assign(first_word_.back(), 0);
    }
    void clear() { std::fill(words_.begin(), words_.end(), 0); }
    void set(int row, int bit) { words_[first_word_[row] + bit / 64] |= std::uint64_t{1} << (bit % 64); }
    void reset(int row, int bit) { words_[first_word_[row] + bit / 64] &= ~(std::uint64_t{1} << (bit % 64)); }
    // -1: none is set.
    int first(int row) const {
        for (int word = first_word_[row]; word < first_word_[row + 1]; ++word) {
            if (words_[word] != 0) return (word - first_word_[row]) * 64 + __builtin_ctzll(words_[word]);
        }
        return -1;
    }

  private:
    std::vector<int> first_word_;
    std::vector<std::uint64_t> words_;
};

}  // namespace mosaic::search::pipeline
