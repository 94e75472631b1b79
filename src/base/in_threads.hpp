#pragma once

#include <cstddef>
#include <functional>

namespace accelerate {

// As many threads as reading files gains from: one a core, up to four.
std::size_t reading_threads();

// Calls what `make` returns with each index below `count` once, on `threads` threads; the first
// error ends them all and is thrown. Every thread calls `make` itself, so that what it returns can
// hold what is that thread's own. The calling thread is one of them, unless there is a `watch`,
// which it then calls every 2 ms until the others are done.
void in_threads(std::size_t threads, std::size_t count,
                const std::function<std::function<void(std::size_t)>()>& make,
                const std::function<void()>& watch = nullptr);

}  // namespace accelerate
