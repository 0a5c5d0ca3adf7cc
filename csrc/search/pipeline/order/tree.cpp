#include <algorithm>
#include <cmath>

#include "search/pipeline/order/explorer.h"

namespace mosaic::search::pipeline {
namespace {

constexpr double kBeta = 0.08;  // PipeWeaver's constants; alpha is 4, the power below
constexpr int kTries = 10;      // roll-outs of a new node
constexpr std::size_t kMaxNodes = 2000000;

// The natural logarithm from sums and products alone, so that it is the same on every machine.
double log_of(double value) {
    int exponent = 0;
    const double half = std::frexp(value, &exponent);  // in [0.5, 1)
    const double x = (half - 1) / (half + 1);
    double sum = 0, power = x;
    for (int i = 1; i < 40; i += 2) {
        sum += power / i;
        power *= x * x;
    }
    return 2 * sum + exponent * 0.69314718055994530942;
}

struct Node {
    Node(int group, int parent) : group(group), parent(parent) {}
    int group;
    int parent;
    int visits = 0;
    double score = 0;
    bool is_done = false;  // everything below it has been tried
    bool is_open = false;  // its children are known
    std::vector<int> untried, children;
};

class Tree {
  public:
    explicit Tree(Explorer& explorer) : explorer_(explorer) { nodes_.emplace_back(-1, -1); }

    void run() {
        while (!explorer_.is_over() && !nodes_[0].is_done && nodes_.size() < kMaxNodes) {
            const int node = expand(select());
            double score = 0;
            const bool is_whole = order_.size() == explorer_.groups.natural.size();
            for (int i = 0; i < (is_whole ? 1 : kTries) && !explorer_.is_over(); ++i) score = std::max(score, roll());
            for (int up = node; up >= 0; up = nodes_[up].parent) {
                ++nodes_[up].visits;
                nodes_[up].score = std::max(nodes_[up].score, score);
                nodes_[up].is_done = is_finished(up);
            }
        }
    }

  private:
    int select() {
        order_.clear();
        missing_ = explorer_.groups.num_before;
        int at = 0;
        while (true) {
            open(at);
            if (!nodes_[at].untried.empty() || nodes_[at].children.empty()) return at;
            double best = -1;
            int chosen = -1;
            const double seen = log_of(nodes_[at].visits);
            for (const int child : nodes_[at].children) {
                if (nodes_[child].is_done) continue;
                const double square = nodes_[child].score * nodes_[child].score;
                const double value = square * square + kBeta * std::sqrt(seen / nodes_[child].visits);
                if (value > best) {
                    best = value;
                    chosen = child;
                }
            }
            at = chosen;
            step(nodes_[at].group);
        }
    }

    void step(int group) {
        order_.push_back(group);
        missing_[group] = -1;
        for (const int other : explorer_.groups.after[group]) --missing_[other];
    }

    void open(int at) {
        if (nodes_[at].is_open) return;
        nodes_[at].is_open = true;
        // The last is tried first: the natural order.
        const std::vector<int>& natural = explorer_.groups.natural;
        for (auto group = natural.rbegin(); group != natural.rend(); ++group) {
            if (missing_[*group] == 0) nodes_[at].untried.push_back(*group);
        }
    }

    int expand(int at) {
        if (nodes_[at].untried.empty()) return at;
        const int group = nodes_[at].untried.back();
        nodes_[at].untried.pop_back();
        const int made = static_cast<int>(nodes_.size());
        nodes_[at].children.push_back(made);
        nodes_.emplace_back(group, at);
        step(group);
        return made;
    }

    // The share of time in which rows work; 0 where they wait for ever.
    double roll() {
        Ranking ranking = explorer_.natural();
        ranking.forward = order_;
        explorer_.draw(ranking.forward, order_.size());
        ranking.backward = ranking.forward;
        const Ns makespan = explorer_.roll(ranking, true);
        if (makespan == kNever || makespan == 0) return 0;
        return static_cast<double>(explorer_.tasks.total_time()) /
               (static_cast<double>(makespan) * explorer_.tasks.num_rows());
    }

    bool is_finished(int at) const {
        const Node& node = nodes_[at];
        if (!node.is_open) return depth(at) == explorer_.groups.natural.size();
        return node.untried.empty() && std::all_of(node.children.begin(), node.children.end(),
                                                   [&](int child) { return nodes_[child].is_done; });
    }

    std::size_t depth(int at) const {
        std::size_t depth = 0;
        for (; nodes_[at].parent >= 0; at = nodes_[at].parent) ++depth;
        return depth;
    }

    Explorer& explorer_;
    std::vector<Node> nodes_;
    std::vector<int> order_, missing_;
};

}  // namespace

void run_tree(Explorer& explorer) { Tree(explorer).run(); }

}  // namespace mosaic::search::pipeline
