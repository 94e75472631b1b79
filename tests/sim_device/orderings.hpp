#pragma once

namespace sim {

/// What puts work in order: a stream waits for an event, the host waits, an allocator is told that
/// another stream uses its memory.
enum class Ordering { wait, synchronize, record_stream };

/// Whether this one is to be left out, to see that somebody notices. Places are those of the
/// library's code that ask for an ordering, by their address in libaccelerate_on_sim.so.
///
/// SIM_ORDERINGS=FILE: at the end of the process, a line "KIND ADDRESS TIMES" is added to FILE for
///   each place that was met.
/// SIM_LEAVE_OUT=ADDRESS,...: orderings asked for from these places do not happen.
bool is_left_out(Ordering kind);

}  // namespace sim
