// The Python face of csrc/search: names and plain values. No logic.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/signals.h"
#include "search/plans/plan_search.h"
#include "search/stages/interference.h"

namespace py = pybind11;
using namespace mosaic::search;

void bind_context(py::module_& module);
void bind_orders(py::module_& module);

namespace {

using Row = std::tuple<int, int, Ns, Ns, std::int64_t>;
using ShareRows = std::tuple<int, int, std::vector<std::vector<double>>>;

Module make_module(const std::vector<Row>& rows, const std::vector<int>& before) {
    std::vector<Option> options;
    for (const auto& [degree, quota, forward, backward, memory] : rows) {
        options.push_back({degree, quota, forward, backward, memory});
    }
    Module module{options, 0};
    for (const int other : before) {
        if (other < 0 || other >= kMaxModules) {
            throw std::invalid_argument("before=" + std::to_string(other) + " is no module; use 0 to " +
                                        std::to_string(kMaxModules - 1));
        }
        module.before |= Mask{1} << other;
    }
    return module;
}

std::vector<PairShares> shares_of(const std::vector<ShareRows>& given) {
    std::vector<PairShares> shares;
    for (const auto& [module, beside, rows] : given) shares.push_back({module, beside, rows});
    return shares;
}

void bind_problem(py::module_& module) {
    py::class_<Module>(module, "Module",
                       "Options (degree, quota, forward_ns, backward_ns, memory_bytes), and modules of earlier stages.")
        .def(py::init(&make_module), py::arg("rows"), py::arg("before"));
    py::class_<Problem>(module, "Problem", "What is to be planned.")
        .def(py::init([](const std::vector<Module>& modules, int num_devices, int num_slots, std::int64_t memory) {
                 Problem problem{modules, {num_devices, num_slots, memory}, {}};
                 check(problem);
                 return problem;
             }),
             py::arg("modules"), py::kw_only(), py::arg("num_devices"), py::arg("num_slots"),
             py::arg("memory_bytes") = 0)
        .def(
            "disturb_by_shares",
            [](Problem& problem, const std::vector<ShareRows>& forward, const std::vector<ShareRows>& backward) {
                disturb_by_shares(problem, {shares_of(forward), shares_of(backward)});
            },
            py::arg("forward"), py::arg("backward"),
            "Adds, for (module, neighbour), the share of its time alone that the neighbour costs, by both quotas.");
}

py::tuple tuple_of(const std::vector<int>& values) {
    py::tuple made(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) made[i] = values[i];
    return made;
}

py::list rows_of(const Stage& stage) {
    py::list rows;
    for (const Placed& placed : stage.placed) {
        rows.append(py::make_tuple(placed.module, placed.option, tuple_of(placed.devices)));
    }
    return rows;
}

void bind_plan(py::module_& module) {
    py::class_<Stage>(module, "Stage", "Modules side by side.")
        .def_readonly("latency_ns", &Stage::latency)
        .def_property_readonly("rows", &rows_of, "(module, option, devices) of each: many values at once.");
    py::class_<Plan>(module, "Plan", "The best plan found, and a bound that no plan can be below.")
        .def_property_readonly("status",
                               [](const Plan& plan) { return plan.status == Status::optimal ? "optimal" : "feasible"; })
        .def_readonly("cost_ns", &Plan::cost, "INT64_MAX // 4 without a plan.")
        .def_readonly("bound_ns", &Plan::bound)
        .def_readonly("stages", &Plan::stages);
}

}  // namespace

PYBIND11_MODULE(_search, module) {
    module.doc() =
        "Planning's hot loops. The same input and seed give the same answer unless the clock ends the search. Times "
        "are "
        "nanoseconds, sets of modules are bitmasks; ValueError for input that no search accepts.";
    bind_problem(module);
    bind_plan(module);
    bind_orders(module);
    bind_context(module);
    module.def(
        "plan",
        [](const Problem& problem, double effort, double seconds, std::int64_t max_nodes,
           const std::vector<Mask>& forbidden, const py::object& should_stop) {
            return until_signalled(&should_stop,
                                   [&] { return plan(problem, {effort, max_nodes, seconds}, forbidden); });
        },
        py::arg("problem"), py::kw_only(), py::arg("effort") = Limits{}.effort, py::arg("seconds") = Limits{}.seconds,
        py::arg("max_nodes") = Limits{}.max_nodes, py::arg("forbidden") = std::vector<Mask>{},
        py::arg("should_stop") = py::none(), py::call_guard<py::gil_scoped_release>(),
        "Searches until its effort (in about seconds of a core), the clock or should_stop ends it.");
    module.def(
        "spend",
        [](double effort) {
            Work::add(static_cast<std::int64_t>(effort * 1e9));
            return Work::done_s();
        },
        py::arg("effort") = 0.0,
        "Adds effort, in about seconds of a core, to what searches on this thread have spent; returns that.");
}
