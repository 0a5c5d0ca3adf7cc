// Local search over rankings.
#pragma once

#include "search/pipeline/order/explorer.h"

namespace mosaic::search::pipeline {

class Shifts {
  public:
    explicit Shifts(Explorer& explorer);

    // Tries shifts from where the last call ended; kicks first where that one brought nothing.
    void run(std::int64_t num_tries);
    // Whether the ranking that it stands at comes to its end, and its orders then.
    bool has_orders() const { return value_ < kNever; }
    Orders orders();
    // How many tries it takes to have looked around.
    std::int64_t round() const { return 64 + 32 * static_cast<std::int64_t>(explorer_.groups.natural.size()); }

  private:
    bool try_one();
    void kick();
    void change(Ranking& ranking);
    int move(std::vector<int>& order, bool is_bound);

    Explorer& explorer_;
    Ranking at_, best_;
    Ns value_ = kNever, best_value_ = kNever;
    bool has_gained_ = true;
};

}  // namespace mosaic::search::pipeline
