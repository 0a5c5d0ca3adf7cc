// Green contexts and their streams, with the rules of destruction of CUDA before and after 13.1.
#include "state.h"

namespace fake {
namespace {

constexpr int kStreamsOutliveContexts = 13010;  // from here on a stream can be destroyed after its context
constexpr std::size_t kBytesOfContext = std::size_t{3} << 20;
constexpr std::size_t kBytesOfStream = std::size_t{64} << 10;

Result cuGreenCtxCreate(GreenContext** out, Descriptor* descriptor, int device, unsigned flags) {
    FAKE_ENTER("cuGreenCtxCreate");
    const Descriptor* made_from = find(state().descriptors, descriptor);
    if (out == nullptr || made_from == nullptr) return kInvalidValue;
    if (!state().has(device)) return kInvalidDevice;
    if (made_from->device != device) return kInvalidValue;
    if (flags != kGreenDefaultStream) return kInvalidValue;  // which versions before 13.3 need
    if (state().primary_references[device]++ == 0) ++state().created["primary"];
    auto context = std::make_unique<GreenContext>();
    context->device = device;
    context->sms = made_from->sms;
    *out = keep(state().contexts, std::move(context));
    state().used_bytes[device] += kBytesOfContext;
    ++state().created["green"];
    return kSuccess;
}

Result cuGreenCtxDestroy(GreenContext* handle) {
    FAKE_ENTER("cuGreenCtxDestroy");
    GreenContext* context = find(state().contexts, handle);
    if (context == nullptr) return misuse("unknown_context", kInvalidContext);
    if (!context->alive) return misuse("context_destroyed_twice", kContextIsDestroyed);
    if (context->num_streams > 0) ++state().misused["context_destroyed_before_its_streams"];
    context->alive = false;
    if (--state().primary_references[context->device] == 0) ++state().destroyed["primary"];
    state().used_bytes[context->device] -= kBytesOfContext;
    ++state().destroyed["green"];
    return kSuccess;
}

Result cuGreenCtxGetDevResource(GreenContext* handle, Resource* out, int type) {
    FAKE_ENTER("cuGreenCtxGetDevResource");
    const GreenContext* context = find(state().contexts, handle);
    if (context == nullptr || !context->alive) return kInvalidContext;
    if (type != kResourceTypeSm) return kInvalidResourceType;
    if (out->type != 0) return kInvalidValue;  // outputs are zeroed by the caller, see split.cpp
    describe_sms(out, context->device, context->sms);
    return kSuccess;
}

Result cuGreenCtxStreamCreate(Stream** out, GreenContext* handle, unsigned flags, int) {
    FAKE_ENTER("cuGreenCtxStreamCreate");
    GreenContext* context = find(state().contexts, handle);
    if (context == nullptr || !context->alive) return kInvalidContext;
    if (out == nullptr || flags != kStreamNonBlocking) return kInvalidValue;
    auto stream = std::make_unique<Stream>();
    stream->context = context;
    stream->device = context->device;
    *out = keep(state().streams, std::move(stream));
    ++context->num_streams;
    state().used_bytes[context->device] += kBytesOfStream;
    ++state().created["stream"];
    return kSuccess;
}

Result cuStreamDestroy(Stream* handle) {
    FAKE_ENTER("cuStreamDestroy");
    Stream* stream = find(state().streams, handle);
    if (stream == nullptr || !stream->alive) return misuse("stream_destroyed_twice", kInvalidHandle);
    if (!stream->context->alive && state().version < kStreamsOutliveContexts) return kContextIsDestroyed;
    stream->alive = false;
    --stream->context->num_streams;
    state().used_bytes[stream->context->device] -= kBytesOfStream;
    ++state().destroyed["stream"];
    return kSuccess;
}

// The legacy default stream waits for nobody here: a green stream "should perform no implicit synchronization with the
// default stream" (cuda.h, cuGreenCtxStreamCreate).
Result cuStreamSynchronize(void* handle) {
    FAKE_ENTER("cuStreamSynchronize");
    Stream* stream = nullptr;
    if (const Result bad = find_stream(handle, &stream)) return bad;
    run_pending(*stream, stream->num_given);
    return kSuccess;
}

}  // namespace

Result find_stream(void* handle, Stream** found) {
    const int device = current_device();
    if (device < 0) return kInvalidContext;
    if (handle == nullptr) {
        *found = &state().default_streams[device];
        (*found)->device = device;
        return kSuccess;
    }
    Stream* stream = find(state().streams, handle);
    if (stream == nullptr || !stream->alive) return misuse("dead_stream", kInvalidHandle);
    if (!stream->context->alive) {
        // "Once the green context is destroyed, any subsequent API calls involving these streams (including
        // cuStreamDestroy) will return CUDA_ERROR_CONTEXT_IS_DESTROYED" (cuda.h of 13.0, cuGreenCtxDestroy);
        // "CUDA_ERROR_STREAM_DETACHED with the exception of the following APIs: cuStreamDestroy" (13.1 and later).
        return misuse("stream_of_a_dead_context",
                      state().version < kStreamsOutliveContexts ? kContextIsDestroyed : kStreamDetached);
    }
    *found = stream;
    return stream->device == device ? kSuccess : kInvalidHandle;
}

void give(Stream& stream, std::function<void()> work) {
    ++stream.num_given;
    stream.pending.push_back(std::move(work));
}

void run_pending(Stream& stream, int up_to) {
    while (stream.num_run < up_to) {
        const std::function<void()> work = std::move(stream.pending.front());
        stream.pending.pop_front();
        ++stream.num_run;
        work();
    }
}

const std::vector<Function>& green_functions() {
    static const std::vector<Function> functions = {
        {"cuGreenCtxCreate", 12040, address_of(&cuGreenCtxCreate)},
        {"cuGreenCtxDestroy", 12040, address_of(&cuGreenCtxDestroy)},
        {"cuGreenCtxGetDevResource", 12040, address_of(&cuGreenCtxGetDevResource)},
        {"cuGreenCtxStreamCreate", 12050, address_of(&cuGreenCtxStreamCreate)},
        {"cuStreamDestroy", 4000, address_of(&cuStreamDestroy)},
        {"cuStreamSynchronize", 2000, address_of(&cuStreamSynchronize)},
    };
    return functions;
}

}  // namespace fake

extern "C" int mosaic_fake_given(void* stream) { return fake::find(fake::state().streams, stream)->num_given; }
