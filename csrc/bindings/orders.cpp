// The Python face of csrc/search/pipeline.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/signals.h"
#include "search/pipeline/bounds.h"
#include "search/pipeline/order/order_search.h"

namespace py = pybind11;
using namespace mosaic::search;
using namespace mosaic::search::pipeline;

namespace {

using Column = std::vector<std::int64_t>;

// Many whole numbers at once: what holds them as 8 bytes each, such as array.array("q").
Column column_of(const py::buffer& given) {
    const py::buffer_info info = given.request();
    if (info.ndim != 1 || info.itemsize != 8 || info.strides[0] != 8) {
        throw std::invalid_argument("a column is not a sequence of 8-byte integers; use array.array('q')");
    }
    const auto* first = static_cast<const std::int64_t*>(info.ptr);
    return Column(first, first + info.size);
}

Columns columns_of(const std::vector<py::buffer>& tasks, const std::vector<py::buffer>& waits, const Column& rank_of,
                   const Column& base, const Column& limit) {
    if (tasks.size() != 7 || waits.size() != 3) {
        throw std::invalid_argument("tasks have 7 columns and waits 3; given are " + std::to_string(tasks.size()) +
                                    " and " + std::to_string(waits.size()));
    }
    Columns columns;
    Column* of_tasks[] = {&columns.row,  &columns.kind,  &columns.microbatch, &columns.group,
                          &columns.time, &columns.takes, &columns.frees};
    Column* of_waits[] = {&columns.source, &columns.target, &columns.lag};
    for (std::size_t i = 0; i < tasks.size(); ++i) *of_tasks[i] = column_of(tasks[i]);
    for (std::size_t i = 0; i < waits.size(); ++i) *of_waits[i] = column_of(waits[i]);
    for (const Column* column : of_tasks) {
        if (column->size() != columns.row.size()) throw std::invalid_argument("the columns of tasks differ in length");
    }
    for (const Column* column : of_waits) {
        if (column->size() != columns.source.size())
            throw std::invalid_argument("the columns of waits differ in length");
    }
    columns.rank_of = rank_of;
    columns.base = base;
    columns.limit = limit;
    return columns;
}

struct Replayed {
    Ns makespan;  // kNever: they wait for ever
    std::vector<Ns> starts;
    std::vector<Bytes> peak;
    std::optional<Deadlock> deadlock;
};

Replayed replay(const Tasks& tasks, const Orders& orders) {
    check_orders(tasks, orders);
    Replay played(tasks);
    const Ns makespan = played.run(orders);
    if (makespan == kNever) return {makespan, {}, {}, played.deadlock(orders)};
    return {makespan, played.starts(), played.peak(), std::nullopt};
}

std::tuple<Orders, Replayed> roll_out(const Tasks& tasks) {
    const Groups groups(tasks);
    Rollout rollout(tasks);
    const Ns makespan = rollout.run({groups.natural, groups.natural});
    if (makespan == kNever) return {Orders{}, {makespan, {}, {}, rollout.deadlock()}};
    return {rollout.orders(),
            {makespan, rollout.starts(), peak_of(tasks, rollout.orders(), rollout.starts()), std::nullopt}};
}

}  // namespace

void bind_orders(py::module_& module) {
    py::class_<Tasks, std::shared_ptr<Tasks>>(
        module, "Tasks",
        "A step's tasks in columns: row, kind, microbatch, group, time, takes, frees; waits: source, target, lag.")
        .def(py::init([](const std::vector<py::buffer>& tasks, const std::vector<py::buffer>& waits,
                         const Column& rank_of, const Column& base, const Column& limit) {
                 Columns columns = columns_of(tasks, waits, rank_of, base, limit);
                 const py::gil_scoped_release release;
                 return std::make_shared<Tasks>(std::move(columns));
             }),
             py::arg("tasks"), py::arg("waits"), py::arg("rank_of"), py::arg("base_bytes"), py::arg("limit_bytes"));
    py::class_<Deadlock>(module, "Deadlock", "Rows that wait for ever.")
        .def_readonly("waiting", &Deadlock::waiting)
        .def_readonly("at_ns", &Deadlock::at)
        .def_readonly("short_bytes", &Deadlock::short_by);
    py::class_<Replayed>(module, "Replayed", "A step played.")
        .def_readonly("makespan_ns", &Replayed::makespan)
        .def_readonly("start_ns", &Replayed::starts)
        .def_readonly("peak_bytes", &Replayed::peak)
        .def_readonly("deadlock", &Replayed::deadlock, "With a deadlock nothing else counts.");
    py::class_<FoundOrders>(module, "FoundOrders", "The best orders that a search found.")
        .def_readonly("has_any", &FoundOrders::has_any)
        .def_readonly("orders", &FoundOrders::orders)
        .def_readonly("start_ns", &FoundOrders::starts)
        .def_readonly("makespan_ns", &FoundOrders::makespan)
        .def_readonly("peak_bytes", &FoundOrders::peak)
        .def_readonly("num_rollouts", &FoundOrders::num_rollouts)
        .def_readonly("progress", &FoundOrders::progress)
        .def_readonly("deadlock", &FoundOrders::deadlock, "The first one.");
    module.def("replay", &replay, py::arg("tasks"), py::arg("orders"), py::call_guard<py::gil_scoped_release>(),
               "Plays orders.");
    module.def("roll_out", &roll_out, py::arg("tasks"), py::call_guard<py::gil_scoped_release>(),
               "Rolls the natural ranking of groups out.");
    module.def("lower_bound", &lower_bound, py::arg("tasks"), py::call_guard<py::gil_scoped_release>(),
               "Returns a time that no orders are below.");
    module.def(
        "find_orders",
        [](const Tasks& tasks, const std::string& method, double seconds, std::int64_t max_rollouts, int num_threads,
           std::uint64_t seed, Ns bound, const py::object& should_stop) {
            return until_signalled(&should_stop, [&] {
                return find_orders(tasks, method, {seconds, max_rollouts, num_threads, seed, bound});
            });
        },
        py::arg("tasks"), py::arg("method"), py::kw_only(), py::arg("seconds"), py::arg("max_rollouts"),
        py::arg("num_threads"), py::arg("seed"), py::arg("bound_ns"), py::arg("should_stop"),
        py::call_guard<py::gil_scoped_release>(), "Searches for orders.");
}
