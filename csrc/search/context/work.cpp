#include "search/context/work.h"

#include <algorithm>
#include <array>

namespace mosaic::search::context {

namespace {

// Adds what a run's tokens see to its blocks: `base` each, and with a slope 1 for the first, 2 for the second token.
void add(std::vector<std::int64_t>& work, const Run& run, std::int64_t base, bool has_slope, std::int64_t block) {
    for (std::int64_t begin = run.start; begin < run.end;) {
        const std::int64_t index = begin / block;
        const std::int64_t end = std::min(run.end, (index + 1) * block);
        const std::int64_t count = end - begin, before = begin - run.start;
        std::int64_t seen = base * count;
        if (has_slope) seen += before * count + count * (count + 1) / 2;
        work[static_cast<std::size_t>(index)] += seen;
        begin = end;
    }
}

}  // namespace

std::vector<std::int64_t> work_of_blocks(const Runs& runs, std::int64_t block) {
    std::vector<std::int64_t> work(static_cast<std::size_t>((runs.num_tokens + block - 1) / block));
    std::array<std::int64_t, kStreams> before{};  // tokens of the document so far, by stream
    int document = -1;
    for (const Run& run : runs.runs) {
        if (run.document < 0) continue;
        if (run.document != document) before.fill(0);
        document = run.document;
        std::int64_t base = 0;
        for (int stream = 0; stream < kStreams; ++stream) {
            base += (run.attends >> stream & 1) != 0 ? before[static_cast<std::size_t>(stream)] : 0;
        }
        std::int64_t& own = before[static_cast<std::size_t>(run.stream)];
        if (run.both) base += runs.find(document, run.stream)->count - own;
        add(work, run, base, !run.both && run.sees(run), block);
        own += run.end - run.start;
    }
    return work;
}

}  // namespace mosaic::search::context
