#include "search/context/runs.h"

#include <algorithm>
#include <array>

namespace mosaic::search::context {

namespace {

constexpr std::int64_t kStretch = 256;  // tokens compared at once, so that long runs cost what reading them costs

// The first tokens of runs.
std::vector<std::int64_t> starts_of(const std::int64_t* words, const std::int32_t* documents, std::int64_t count) {
    std::vector<std::int64_t> starts{0};
    for (std::int64_t begin = 1; begin < count; begin += kStretch) {
        const std::int64_t end = std::min(begin + kStretch, count);
        std::int64_t differs = 0;
        for (std::int64_t i = begin; i < end; ++i) {
            differs |= (words[i] ^ words[i - 1]) | (documents[i] ^ documents[i - 1]);
        }
        if (differs == 0) continue;
        for (std::int64_t i = begin; i < end; ++i) {
            if (words[i] != words[i - 1] || documents[i] != documents[i - 1]) starts.push_back(i);
        }
    }
    return starts;
}

// Adds documents one after the other to `Runs`.
class Documents {
  public:
    explicit Documents(Runs& made) : made_(made) {}

    void add(const Run& run) {
        if (run.document == made_.num_documents()) {
            close();
            made_.first_token.push_back(run.start);
        }
        StreamTokens& own = streams_[static_cast<std::size_t>(run.stream)];
        own.count += run.end - run.start;
        own.last = run.end - 1;
    }

    // Ends a document, if there was one, and notes where the next one's streams begin.
    void close() {
        for (int stream = 0; stream < kStreams; ++stream) {
            StreamTokens& own = streams_[static_cast<std::size_t>(stream)];
            if (own.count > 0) made_.streams.push_back({stream, own.count, own.last});
            own = {};
        }
        made_.first_stream.push_back(made_.streams.size());
    }

  private:
    Runs& made_;
    std::array<StreamTokens, kStreams> streams_{};
};

}  // namespace

std::size_t Runs::run_of(std::int64_t token) const {
    const auto after = std::upper_bound(runs.begin(), runs.end(), token,
                                        [](std::int64_t place, const Run& run) { return place < run.start; });
    return static_cast<std::size_t>(after - runs.begin()) - 1;
}

const StreamTokens* Runs::find(int document, int stream) const {
    const std::size_t index = static_cast<std::size_t>(document);
    for (std::size_t i = first_stream[index]; i < first_stream[index + 1]; ++i) {
        if (streams[i].stream == stream) return &streams[i];
    }
    return nullptr;
}

Runs find_runs(const std::int64_t* words, const std::int32_t* documents, std::int64_t num_tokens) {
    Runs made;
    made.num_tokens = num_tokens;
    Documents known(made);
    const std::vector<std::int64_t> starts = starts_of(words, documents, num_tokens);
    std::int32_t current = -1;
    int number = -1;
    for (std::size_t i = 0; i < starts.size(); ++i) {
        const std::int64_t start = starts[i];
        const std::uint64_t word = static_cast<std::uint64_t>(words[start]);
        Run run;
        run.start = start;
        run.end = i + 1 < starts.size() ? starts[i + 1] : num_tokens;
        run.attends = word & ((std::uint64_t{1} << kStreams) - 1);
        run.stream = static_cast<int>(word >> kStreams & 63);
        run.both = (word >> 62 & 1) != 0;
        run.document = -1;
        if (documents[start] >= 0) {
            number += number < 0 || documents[start] != current ? 1 : 0;
            current = documents[start];
            run.document = number;
            known.add(run);
        }
        made.runs.push_back(run);
    }
    known.close();
    return made;
}

}  // namespace mosaic::search::context
