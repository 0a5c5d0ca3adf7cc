// Events, of which Mosaic's extension uses none: torch records and waits for them on Mosaic's streams.
//
// "hEvent and hStream must be from the same context otherwise CUDA_ERROR_INVALID_HANDLE is returned" (cuda.h,
// cuEventRecord). What that means for an event of the primary context and a stream of a green context is not said: a
// green context made a CUcontext "is a normal primary context but with the resources of the specified green context"
// (cuCtxFromGreenCtx), and cuGreenCtxRecordEvent asks for "the same primary context" only. So they count as one context
// here; the quirk strict_events takes the words as they stand. Waiting has no such rule: "hEvent may be from a
// different context or device than hStream" (cuStreamWaitEvent).
#include "state.h"

namespace fake {
namespace {

Result cuEventCreate(Event** out, unsigned) {
    FAKE_ENTER("cuEventCreate");
    if (current_device() < 0) return kInvalidContext;
    auto event = std::make_unique<Event>();
    event->device = current_device();
    *out = keep(state().events, std::move(event));
    return kSuccess;
}

Result cuEventRecord(Event* handle, void* stream_handle) {
    FAKE_ENTER("cuEventRecord");
    Event* event = find(state().events, handle);
    Stream* stream = nullptr;
    if (const Result bad = find_stream(stream_handle, &stream)) return bad;
    if (event == nullptr || event->device != stream->device) return kInvalidHandle;
    if (state().quirk == "strict_events" && stream->context != nullptr) return kInvalidHandle;
    event->stream = stream;
    event->num_given = stream->num_given;
    return kSuccess;
}

Result cuStreamWaitEvent(void* stream_handle, Event* handle, unsigned) {
    FAKE_ENTER("cuStreamWaitEvent");
    const Event* event = find(state().events, handle);
    Stream* stream = nullptr;
    if (const Result bad = find_stream(stream_handle, &stream)) return bad;
    if (event == nullptr) return kInvalidHandle;
    if (Stream* recorded = event->stream) {  // an event that was never recorded is an empty set of work
        give(*stream, [recorded, up_to = event->num_given] { run_pending(*recorded, up_to); });
    }
    return kSuccess;
}

}  // namespace

const std::vector<Function>& event_functions() {
    static const std::vector<Function> functions = {
        {"cuEventCreate", 2000, address_of(&cuEventCreate)},
        {"cuEventRecord", 2000, address_of(&cuEventRecord)},
        {"cuStreamWaitEvent", 3020, address_of(&cuStreamWaitEvent)},
    };
    return functions;
}

}  // namespace fake
