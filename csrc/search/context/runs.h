// A mask of one sequence in runs: stretches of tokens with one word in one document.
#pragma once

#include <cstdint>
#include <vector>

namespace mosaic::search::context {

constexpr int kStreams = 56;  // of a document, numbered from 0

// Tokens start to end, end not included. A word is as in mosaic/context/words.py.
struct Run {
    std::int64_t start = 0;
    std::int64_t end = 0;
    std::uint64_t attends = 0;  // a bit for each stream
    int stream = 0;
    int document = 0;   // numbered anew from 0 in order; -1 for padding
    bool both = false;  // sees its own stream in both directions

    bool sees(const Run& other) const { return document == other.document && (attends >> other.stream & 1) != 0; }
    bool sees_ahead(const Run& other) const { return both && document == other.document && stream == other.stream; }
};

// All tokens of one stream in one document.
struct StreamTokens {
    int stream = 0;
    std::int64_t count = 0;
    std::int64_t last = 0;  // the last of them
};

// Runs in their order, and what each document has.
struct Runs {
    std::int64_t num_tokens = 0;
    std::vector<Run> runs;
    std::vector<std::int64_t> first_token;  // of each document
    std::vector<std::size_t> first_stream;  // of each document its place in `streams`, and one more for their end
    std::vector<StreamTokens> streams;      // document after document

    std::size_t run_of(std::int64_t token) const;  // its place in `runs`
    int num_documents() const { return static_cast<int>(first_token.size()); }
    const StreamTokens* find(int document, int stream) const;  // null where the document has none of it
};

// Words and documents of tokens, checked as MaskWords checks them.
Runs find_runs(const std::int64_t* words, const std::int32_t* documents, std::int64_t num_tokens);

}  // namespace mosaic::search::context
