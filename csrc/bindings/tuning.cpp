// The Python face of layer tuning: names and plain values. No logic.
#include "bindings/tuning.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>

#include "bindings/signals.h"
#include "search/pipeline/tuning_candidates.h"
#include "search/pipeline/tuning_selection.h"

namespace py = pybind11;
using namespace mosaic::search;

namespace {

using WayRow = std::tuple<Ns, Ns, std::int64_t>;
using CandidateRow = std::tuple<Ns, Ns, std::int64_t, std::int64_t, std::vector<int>>;
using Columns = std::tuple<std::vector<Ns>, std::vector<Ns>, std::vector<std::int64_t>, std::vector<std::int64_t>>;
using SpanRow = std::tuple<Ns, Ns, Ns, Ns>;
using SnapshotRows = std::pair<std::vector<SpanRow>, std::vector<std::pair<Ns, std::int64_t>>>;

std::vector<CandidateRow> candidates(const std::vector<std::pair<std::vector<WayRow>, std::int64_t>>& rows, int count) {
    std::vector<TunedLayer> layers;
    for (const auto& [ways, workspace] : rows) {
        layers.push_back({{}, workspace});
        for (const auto& [forward, backward, kept] : ways) layers.back().ways.push_back({forward, backward, kept});
    }
    std::vector<CandidateRow> made;
    for (Candidate& one : tuning_candidates(layers, count)) {
        made.emplace_back(one.forward, one.backward, one.kept, one.workspace, std::move(one.ways));
    }
    return made;
}

class PairTable {
  public:
    explicit PairTable(const std::vector<Columns>& columns) {
        for (const auto& [forward, backward, kept, workspace] : columns) {
            const std::size_t count = kept.size();
            if (count == 0 || forward.size() != count || backward.size() != count || workspace.size() != count) {
                throw std::invalid_argument("a pair's columns have " + std::to_string(count) + " choices and others; " +
                                            "give four columns of one length, 1 at least");
            }
            for (const auto* column : {&forward, &backward, &kept, &workspace}) {
                if (*std::min_element(column->begin(), column->end()) < 0) {
                    throw std::invalid_argument("a pair adds or keeps a negative number; use 0 or more");
                }
            }
            pairs_.push_back({forward, backward, kept, workspace});
        }
    }

    std::vector<MemoryRow> rows(const std::vector<SnapshotRows>& given, std::int64_t limit) const {
        std::vector<Snapshot> snapshots;
        for (const auto& [spans, changes] : given) {
            check_count("spans", spans.size());
            snapshots.emplace_back();
            for (const auto& [start, forward_end, backward_start, end] : spans) {
                snapshots.back().spans.push_back({start, forward_end, backward_start, end});
            }
            for (const auto& [at, bytes] : changes) snapshots.back().changes.push_back({at, bytes});
        }
        return memory_rows(pairs_, snapshots, limit);
    }

    Selection select(const std::vector<SnapshotRows>& snapshots, std::int64_t limit, const Weights& weights,
                     const SelectionLimits& limits) const {
        check_weights("forward weights", weights.forward);
        check_weights("backward weights", weights.backward);
        return select_ways(pairs_, rows(snapshots, limit), weights, limits);
    }

  private:
    void check_count(const char* name, std::size_t count) const {
        if (count == pairs_.size()) return;
        throw std::invalid_argument(std::to_string(count) + " " + name + " for " + std::to_string(pairs_.size()) +
                                    " pairs; give one for each");
    }

    void check_weights(const char* name, const std::vector<double>& weights) const {
        check_count(name, weights.size());
        for (const double weight : weights) {
            if (weight >= 0 && std::isfinite(weight)) continue;
            throw std::invalid_argument(std::string(name) + " have " + std::to_string(weight) +
                                        "; use finite ones, 0 or more");
        }
    }

    std::vector<PairWays> pairs_;
};

}  // namespace

void bind_tuning(py::module_& module) {
    module.def("tuning_candidates", &candidates, py::arg("layers"), py::kw_only(), py::arg("count"),
               py::call_guard<py::gil_scoped_release>(),
               "Combinations of layers' ways, from fast to lean: (forward_ns, backward_ns, kept, workspace, ways).");
    py::class_<PairTable>(module, "PairTable", "The choices of all pairs of a rank.")
        .def(py::init<const std::vector<Columns>&>(), py::arg("pairs"))
        .def(
            "rows",
            [](const PairTable& table, const std::vector<SnapshotRows>& snapshots, std::int64_t limit) {
                std::vector<std::tuple<Ns, std::int64_t, std::vector<int>, std::vector<int>>> made;
                for (MemoryRow& row : table.rows(snapshots, limit)) {
                    made.emplace_back(row.at, row.room, std::move(row.holding), std::move(row.working));
                }
                return made;
            },
            py::arg("snapshots"), py::kw_only(), py::arg("limit_bytes"), py::call_guard<py::gil_scoped_release>(),
            "(at_ns, room_bytes, pairs that hold, pairs that work) of each instant that matters.")
        .def(
            "select",
            [](const PairTable& table, const std::vector<SnapshotRows>& snapshots, std::int64_t limit,
               const std::vector<double>& forward, const std::vector<double>& backward, double gap, int rounds) {
                return until_signalled(
                    nullptr, [&] { return table.select(snapshots, limit, {forward, backward}, {gap, rounds}); });
            },
            py::arg("snapshots"), py::kw_only(), py::arg("limit_bytes"), py::arg("forward_weights"),
            py::arg("backward_weights"), py::arg("gap") = SelectionLimits{}.gap,
            py::arg("rounds") = SelectionLimits{}.rounds, py::call_guard<py::gil_scoped_release>(),
            "Chooses for each pair.");
    py::class_<Selection>(module, "Selection", "A choice for each pair.")
        .def_readonly("chosen", &Selection::chosen)
        .def_readonly("cost_ns", &Selection::cost)
        .def_readonly("bound_ns", &Selection::bound)
        .def_readonly("fits", &Selection::fits)
        .def_readonly("at_ns", &Selection::at)
        .def_readonly("short_bytes", &Selection::short_bytes);
}
