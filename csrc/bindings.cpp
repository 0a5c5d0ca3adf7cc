// The Python face of csrc/driver: names, and the way errors become exceptions. No logic.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "driver/owners.h"
#include "driver/pool.h"
#include "driver/probe.h"
#include "driver/slots.h"

namespace py = pybind11;
using namespace mosaic;

namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

// Looks the class up at each raise: a class kept in a static object would be released after the interpreter.
void raise(const char* name, const char* message, const char* first, const std::string& first_value, const char* second,
           const std::string& second_value) {
    try {
        const py::object type = py::module_::import("mosaic.errors").attr(name);
        py::dict details;
        details[first] = first_value;
        details[second] = second_value;
        PyErr_SetObject(type.ptr(), type(message, **details).ptr());
    } catch (py::error_already_set& error) {
        error.restore();
    }
}

void translate(std::exception_ptr raised) {
    try {
        if (raised) std::rethrow_exception(raised);
    } catch (const CudaError& error) {
        raise("CudaError", error.what(), "call", error.call(), "status", error.status());
    } catch (const Unavailable& error) {
        raise("BackendUnavailableError", error.what(), "found", error.found(), "needed", error.needed());
    }
}

const char* use_text(const DriverFunction& function) {
    switch (function.use) {
        case Use::base:
            return "base";
        case Use::slots:
            return "slots";
        case Use::streams:
            break;
    }
    return "streams";
}

void bind_driver(py::module_& module) {
    py::class_<DriverFunction>(module, "DriverFunction", "A function of the CUDA driver that Mosaic calls.")
        .def_readonly("name", &DriverFunction::name)
        .def_readonly("since", &DriverFunction::since, "1000 * major + 10 * minor of the CUDA that brought it.")
        .def_property_readonly("use", &use_text, "'base', 'slots' or 'streams'.");
    module.def(
        "driver_version", [] { return driver().version(); }, ReleaseGil(),
        "CUDA version of the driver, 1000 * major + 10 * minor.");
    module.def(
        "missing_functions", [] { return driver().missing(); }, ReleaseGil(),
        "Functions that Mosaic calls and this driver does not have.");
    module.def("device_count", &device_count, ReleaseGil(), "Number of devices that the driver offers.");
}

void bind_device(py::module_& module) {
    py::class_<Device>(module, "Device",
                       "One CUDA device, as the driver describes it; ValueError for an ordinal that it does not have.")
        .def(py::init<int>(), py::arg("ordinal"), ReleaseGil())
        .def_property_readonly("ordinal", &Device::ordinal)
        .def_property_readonly("name", &Device::name)
        .def_property_readonly("uuid", &Device::uuid, "As nvidia-smi prints it, \"GPU-\" included.")
        .def_property_readonly("compute_capability", &Device::compute_capability)
        .def_property_readonly("num_sms", &Device::num_sms)
        .def_property_readonly("total_memory_bytes", &Device::total_memory_bytes);
    py::class_<PrimaryContext>(module, "PrimaryContext", py::release_gil_before_calling_cpp_dtor(),
                               "Keeps a device's primary context alive, until close().")
        .def(py::init([](const Device& device) { return PrimaryContext(device.handle()); }), py::arg("device"),
             ReleaseGil())
        .def_property_readonly("held", &PrimaryContext::held)
        .def("close", &PrimaryContext::close, ReleaseGil());
}

void bind_slots(py::module_& module) {
    py::class_<SlotSplit>(module, "SlotSplit",
                          "One split of a device into equal slots and a remainder, which no partition gets.")
        .def(py::init<const Device&>(), py::arg("device"), ReleaseGil())
        .def_property_readonly("num_slots", &SlotSplit::num_slots)
        .def_property_readonly("sms_per_slot", &SlotSplit::sms_per_slot)
        .def_property_readonly("remainder_sms", &SlotSplit::remainder_sms);
}

// Trying costs less than giving the GIL away, so it is given away only where the lock has to be waited for.
StreamPool::Lock lock_for(const StreamPool& pool) {
    StreamPool::Lock lock = pool.try_lock();
    if (lock) return lock;
    const py::gil_scoped_release released;
    return pool.lock();
}

std::uintptr_t number(CUstream stream) { return reinterpret_cast<std::uintptr_t>(stream); }
CUstream stream_of(std::uintptr_t number) { return reinterpret_cast<CUstream>(number); }

void bind_pool_values(py::module_& module) {
    py::class_<PartitionInfo>(module, "PartitionInfo", "What the driver made of a partition.")
        .def_readonly("slots", &PartitionInfo::slots)
        .def_readonly("requested_sms", &PartitionInfo::requested_sms, "Sum over the split's slots.")
        .def_readonly("granted_sms", &PartitionInfo::granted_sms, "Read back from the green context.")
        .def_readonly("sm_ids", &PartitionInfo::sm_ids, "What the probe saw, sorted; None before.")
        .def_readonly("creation_ms", &PartitionInfo::creation_ms, "The context and its stream.");
    py::class_<LayoutCost>(module, "LayoutCost", "What adding a layout made; zeros if every partition existed.")
        .def_readonly("num_contexts", &LayoutCost::num_contexts)
        .def_readonly("creation_ms", &LayoutCost::creation_ms)
        .def_readonly("driver_bytes", &LayoutCost::driver_bytes,
                      "Growth of the memory in use on the device, other processes' included.");
    py::class_<PoolStats>(module, "PoolStats", "What a pool holds, and what making it took.")
        .def_readonly("num_contexts", &PoolStats::num_contexts)
        .def_readonly("num_lent", &PoolStats::num_lent)
        .def_readonly("creation_ms", &PoolStats::creation_ms)
        .def_readonly("driver_bytes", &PoolStats::driver_bytes)
        .def_readonly("layouts", &PoolStats::layouts);
}

void bind_pool(py::module_& module) {
    py::class_<StreamPool>(
        module, "StreamPool", py::release_gil_before_calling_cpp_dtor(),
        "Streams made beforehand for the partitions of layouts (slots of the one split), and lent by "
        "table look-up. Safe from any thread. In a forked child every method raises "
        "BackendUnavailableError; after close() those that lend, add or verify raise ValueError.")
        .def(py::init<const Device&, const std::vector<LayoutSlots>&>(), py::arg("device"),
             py::arg_v("layouts", std::vector<LayoutSlots>{}, "()"), ReleaseGil())
        .def("add_layout", &StreamPool::add_layout, py::arg("layout"), ReleaseGil(),
             "Makes the partitions that the pool lacks; the layout's index is the number of those added before. "
             "ValueError for a slot in two partitions. A failure leaves the pool as it was.")
        .def(
            "lend",
            [](StreamPool& pool, int layout, int partition) {
                return number(pool.lend(lock_for(pool), layout, partition));
            },
            py::arg("layout"), py::arg("partition"),
            "Returns the partition's CUstream, the same for each caller; no driver call.")
        .def(
            "give_back",
            [](StreamPool& pool, std::uintptr_t stream) { pool.give_back(lock_for(pool), stream_of(stream)); },
            py::arg("stream"),
            "Ends one loan, without waiting for the stream; ValueError for a stream that is not lent.")
        .def(
            "partitions", [](const StreamPool& pool, int layout) { return pool.partitions(lock_for(pool), layout); },
            py::arg("layout"))
        .def(
            "verify",
            [](StreamPool& pool, const py::bytes& image) {
                const std::string code = image;
                const py::gil_scoped_release released;
                pool.verify(code);
            },
            py::arg("image"),
            "Runs the probe (a cubin or PTX of PROBE_SOURCE) on every partition and keeps the SM ids seen.")
        .def("stats", [](const StreamPool& pool) { return pool.stats(lock_for(pool)); })
        .def_property_readonly("device", [](const StreamPool& pool) { return pool.split().device(); })
        .def_property_readonly("split", [](const StreamPool& pool) { return pool.split(); })
        .def_property_readonly("closed", &StreamPool::closed)
        .def("close", &StreamPool::close, ReleaseGil(),
             "Waits for the streams and releases everything, even after a failure; raises the first one.");
}

void bind_probe(py::module_& module) {
    module.attr("PROBE_SOURCE") = kProbeSource;
    module.def(
        "probe_stream",
        [](const Device& device, std::uintptr_t stream, const py::bytes& image) {
            const std::string code = image;
            const py::gil_scoped_release released;
            return probe_stream(device, stream_of(stream), code);
        },
        py::arg("device"), py::arg("stream"), py::arg("image"),
        "Sorted ids of the SMs that a stream's kernels run on; 0 is the default stream.");
}

}  // namespace

PYBIND11_MODULE(_C, module) {
    module.doc() =
        "The green-context runtime: CUDA's driver, its devices, their slots, and streams on them. Every call may raise "
        "CudaError (a driver call failed) or BackendUnavailableError (no driver, no device, or a driver without the "
        "function needed). The first call looks for the driver, not the import.";
    py::register_local_exception_translator(&translate);
    bind_driver(module);
    bind_device(module);
    bind_slots(module);
    bind_pool_values(module);
    bind_pool(module);
    bind_probe(module);
}
