// The Python face of masks of long sequences: names and arrays. No logic.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "search/context/runs.h"
#include "search/context/sharing.h"
#include "search/context/tiles.h"
#include "search/context/work.h"

namespace py = pybind11;
using namespace mosaic::search::context;

namespace {

template <typename Value>
using Array = py::array_t<Value, py::array::c_style>;

// Hands a vector over without a copy.
template <typename Value>
py::array_t<Value> array_of(std::vector<Value>&& values) {
    auto* kept = new std::vector<Value>(std::move(values));
    const py::capsule owner(kept, [](void* given) { delete static_cast<std::vector<Value>*>(given); });
    return py::array_t<Value>(static_cast<py::ssize_t>(kept->size()), kept->data(), owner);
}

template <typename Value>
std::vector<Value> vector_of(const Array<Value>& values) {
    return {values.data(), values.data() + values.size()};
}

template <typename Work>
auto without_lock(Work work) {
    const py::gil_scoped_release release;
    return work();
}

}  // namespace

void bind_context(py::module_& module) {
    py::class_<Runs>(module, "MaskRuns", "A mask in runs of tokens with one word in one document.")
        .def(py::init([](const Array<std::int64_t>& words, const Array<std::int32_t>& documents) {
                 if (words.ndim() != 1 || words.size() == 0 || documents.ndim() != 1 ||
                     words.size() != documents.size()) {
                     throw std::invalid_argument("words and documents differ in length; pass one of each per token");
                 }
                 const auto* first = words.data();
                 const auto* document = documents.data();
                 const std::int64_t count = words.size();
                 return without_lock([&] { return find_runs(first, document, count); });
             }),
             py::arg("words").noconvert(), py::arg("documents").noconvert())
        .def(
            "work",
            [](const Runs& runs, std::int64_t block) {
                if (block < 1) throw std::invalid_argument("a block has at least 1 token");
                return array_of(without_lock([&] { return work_of_blocks(runs, block); }));
            },
            py::arg("block"), "Visible pairs of each block of queries.")
        .def(
            "tiles",
            [](const Runs& runs, const Array<std::int64_t>& rows, std::int64_t block) {
                if (block < 1) throw std::invalid_argument("a block has at least 1 token");
                const std::vector<std::int64_t> asked = vector_of(rows);
                for (const std::int64_t row : asked) {
                    if (row < 0 || row * block >= runs.num_tokens) {
                        throw std::invalid_argument("row " + std::to_string(row) + " is not in the sequence");
                    }
                }
                Tiles found = without_lock([&] { return find_tiles(runs, asked, block); });
                return py::make_tuple(array_of(std::move(found.offsets)), array_of(std::move(found.columns)),
                                      array_of(std::move(found.is_full)));
            },
            py::arg("rows").noconvert(), py::arg("block"),
            "Tiles of blocks of queries that have a visible pair: offsets, columns, is_full.");
    module.def(
        "longest_first",
        [](const Array<std::int64_t>& work, std::int32_t ranks, std::int64_t cap) {
            if (ranks < 1 || cap * ranks < work.size()) throw std::invalid_argument("there is no room for all pieces");
            const std::vector<std::int64_t> given = vector_of(work);
            return array_of(without_lock([&] { return longest_first(given, ranks, cap); }));
        },
        py::arg("work").noconvert(), py::kw_only(), py::arg("ranks"), py::arg("cap"),
        "The rank of each piece of work, the largest first.");
    module.def(
        "traded",
        [](const Array<std::int64_t>& work, const Array<std::int32_t>& rank_of, std::int32_t ranks,
           std::int64_t fineness) {
            if (work.size() != rank_of.size() || fineness < 1) {
                throw std::invalid_argument("give a rank for each piece, and a fineness of 1 or more");
            }
            const std::vector<std::int64_t> given = vector_of(work);
            std::vector<std::int32_t> held = vector_of(rank_of);
            for (const std::int32_t rank : held) {
                if (rank < 0 || rank >= ranks) throw std::invalid_argument("a piece has no rank");
            }
            return array_of(without_lock([&] { return traded(given, std::move(held), ranks, fineness); }));
        },
        py::arg("work").noconvert(), py::arg("rank_of").noconvert(), py::kw_only(), py::arg("ranks"),
        py::arg("fineness"), "The rank of each piece after the heaviest ranks have traded pieces.");
}
