// What it costs that ranks agree on each gather before it starts: the agreement alone, over a
// gather that moves nothing; then the same all-gather of 4 KiB with and without, in turns, and
// again with a gather that is announced ahead of some work. Prints a line of JSON for each,
// microseconds on rank 0, medians. The second line has more in it than the agreement: without it,
// the rank that comes first hands its part to the backend while it waits for the others.
//   accelerate-cpp launch -n 4 build/bin/gather_agreement

#include "measure.hpp"

#include <accelerate/accelerator/accelerator.hpp>
#include <parallel/control_flow.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <cstdio>

int main() {
  using namespace accelerate;
  using parallel::ControlFlow;
  const Accelerator accelerator;
  const comm::Group& world = accelerator.world();
  ControlFlow flow(world, {"unit"}, {.gather_ranks = world.size()});
  const at::Tensor mine = at::ones({1024}), all = at::empty({1024 * world.size()});
  const auto gather = [&] { return world.all_gather_into(all, mine); };
  const auto start = [&] { return flow.start({ControlFlow::Event::gather, 0}, all, gather); };
  std::vector<double> alone;
  for (int i = 0; i < 5000; ++i) {
    alone.push_back(1e6 * measure::time([&] {
                            flow.wait(flow.start({ControlFlow::Event::gather, 0}, all,
                                                 [] { return comm::Work(); }))
                                .wait();
                          }).count());
  }
  if (accelerator.is_main_process())
    std::printf("{\"ranks\": %d, \"agreement\": %.1f}\n", world.size(), measure::median(alone));
  const auto work_for = [](std::chrono::microseconds some) {
    const auto end = std::chrono::steady_clock::now() + some;
    while (std::chrono::steady_clock::now() < end) {
    }
  };
  for (const int work : {0, 300}) {
    std::vector<double> without, with;
    for (int i = 0; i < 1000; ++i) {
      without.push_back(1e6 * measure::time([&] {
                                comm::Work under_way = gather();
                                work_for(std::chrono::microseconds(work));
                                under_way.wait();
                              }).count());
      with.push_back(1e6 * measure::time([&] {
                             const auto under_way = start();
                             work_for(std::chrono::microseconds(work));
                             flow.wait(under_way).wait();
                           }).count());
    }
    if (!accelerator.is_main_process()) continue;
    const double plain = measure::median(without), agreed = measure::median(with);
    std::printf(
        "{\"ranks\": %d, \"work\": %d, \"gather\": %.1f, \"agreed\": %.1f, \"more\": %.1f}\n",
        world.size(), work, plain, agreed, agreed - plain);
  }
}
