// Runs on several ranks: what lies under the group. c10d's own interface, c10d::Reducer, meshes,
// and how much a wait costs.
#include "comm/mpi_backend.hpp"
#include "support/distributed.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/comm/mesh.hpp>
#include <accelerate/comm/native.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <sys/resource.h>

#include <chrono>
#include <csignal>
#include <thread>

namespace accelerate::comm {
namespace {

using std::chrono::milliseconds;
using testing::world;

double processor_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

std::vector<at::Tensor> one_of_each(int size, at::ScalarType dtype) {
  std::vector<at::Tensor> list;
  for (int rank = 0; rank < size; ++rank) list.push_back(at::empty({3}, at::TensorOptions(dtype)));
  return list;
}

TEST(Native, OffersEveryCollectiveOfC10d) {
  const auto group = process_group(world());
  ASSERT_TRUE(group);
  const int size = world().size();
  const int rank = world().rank();
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kLong, at::kShort}) {
    const auto mine = at::full({3}, rank + 1, at::TensorOptions(dtype));

    std::vector<std::vector<at::Tensor>> gathered{one_of_each(size, dtype)};
    std::vector<at::Tensor> input{mine};
    group->allgather(gathered, input)->wait();
    for (int other = 0; other < size; ++other)
      EXPECT_EQ(gathered[0][other][2].item<int>(), other + 1);

    std::vector<std::vector<at::Tensor>> at_root;
    if (rank == 1) at_root.push_back(one_of_each(size, dtype));
    c10d::GatherOptions to_one;
    to_one.rootRank = 1;
    group->gather(at_root, input, to_one)->wait();
    if (rank == 1) {
      EXPECT_EQ(at_root[0][0][0].item<int>(), 1);
    }

    std::vector<at::Tensor> received{at::empty({3}, at::TensorOptions(dtype))};
    std::vector<std::vector<at::Tensor>> given;
    if (rank == 1) given.push_back(gathered[0]);
    c10d::ScatterOptions from_one;
    from_one.rootRank = 1;
    group->scatter(received, given, from_one)->wait();
    EXPECT_TRUE(at::equal(received[0], mine));

    std::vector<at::Tensor> reduced{mine.clone()};
    c10d::ReduceOptions onto_one;
    onto_one.rootRank = 1;
    group->reduce(reduced, onto_one)->wait();
    if (rank == 1) {
      EXPECT_EQ(reduced[0][0].item<int>(), size * (size + 1) / 2);
    }

    std::vector<at::Tensor> together{mine.clone(), mine * 2};
    group->allreduce_coalesced(together)->wait();
    EXPECT_EQ(together[1][0].item<int>(), size * (size + 1));

    std::vector<at::Tensor> outputs{at::empty({3 * size}, at::TensorOptions(dtype)),
                                    at::empty({3 * size}, at::TensorOptions(dtype))};
    std::vector<at::Tensor> inputs{mine, mine * 2};
    group->allgather_into_tensor_coalesced(outputs, inputs)->wait();
    EXPECT_EQ(outputs[1][3].item<int>(), 4);

    std::vector<at::Tensor> parts{at::empty({3}, at::TensorOptions(dtype))};
    std::vector<at::Tensor> wholes{at::full({3 * size}, rank, at::TensorOptions(dtype))};
    group->reduce_scatter_tensor_coalesced(parts, wholes)->wait();
    EXPECT_EQ(parts[0][0].item<int>(), size * (size - 1) / 2);

    // In place: the output is this rank's part of the input.
    const auto whole = at::full({3 * size}, rank, at::TensorOptions(dtype));
    auto part = whole.narrow(0, 3 * rank, 3);
    auto all = whole;
    group->_reduce_scatter_base(part, all)->wait();
    EXPECT_EQ(part[2].item<int>(), size * (size - 1) / 2);
    all.fill_(-1);
    part.fill_(rank);
    group->_allgather_base(all, part)->wait();
    EXPECT_EQ(all[3 * (size - 1)].item<int>(), size - 1);
  }
}

TEST(Native, ReceivesFromAnybody) {
  const auto group = process_group(world());
  if (world().rank() == 0) {
    std::vector<bool> came(world().size(), false);
    for (int count = 1; count < world().size(); ++count) {
      std::vector<at::Tensor> tensors{at::zeros({1}, at::kLong)};
      const auto work = group->recvAnysource(tensors, 3);
      work->wait();
      EXPECT_EQ(tensors[0].item<int>(), work->sourceRank());
      came[tensors[0].item<int>()] = true;
    }
    EXPECT_EQ(std::count(came.begin(), came.end(), true), world().size() - 1);
  } else {
    std::vector<at::Tensor> tensors{at::full({1}, world().rank(), at::kLong)};
    group->send(tensors, 0, 3)->wait();
  }
}

TEST(Native, WorksHaveFutures) {
  std::vector<at::Tensor> tensors{at::ones({4})};
  const auto work = process_group(world())->allreduce(tensors);
  const auto future = work->getFuture();
  future->waitAndThrow();
  EXPECT_EQ(future->value().toTensorVector().at(0)[0].item<int>(), world().size());
}

TEST(Mpi, CutsLongMessagesIntoPieces) {
  if (world().backend() != "mpi") GTEST_SKIP() << "for the mpi backend";
  set_mpi_piece(100);
  const auto line = at::arange(1234, at::kFloat);
  const auto sum = line.clone();
  world().all_reduce(sum).wait();
  EXPECT_TRUE(at::equal(sum, line * world().size()));
  const auto sent = world().rank() == 1 ? line.clone() : at::zeros({1234});
  world().broadcast(sent, 1).wait();
  EXPECT_TRUE(at::equal(sent, line));
  if (world().rank() == 0) world().send(line, 1).wait();
  if (world().rank() == 1) {
    const auto got = at::zeros({1234});
    world().recv(got, 0).wait();
    EXPECT_TRUE(at::equal(got, line));
  }
  set_mpi_piece(std::int64_t{1} << 30);
}

TEST(Traffic, CountsByKindTheReducersToo) {
  world().reset_traffic();
  world().all_reduce(at::ones({10})).wait();
  world().all_gather_into(at::empty({2 * world().size()}), at::ones({2})).wait();
  auto traffic = world().traffic();
  EXPECT_EQ(traffic.by_kind.at("all_reduce").calls, 1);
  EXPECT_EQ(traffic.by_kind.at("all_reduce").bytes, 40);
  EXPECT_EQ(traffic.by_kind.at("all_gather").bytes, 8 * world().size());

  world().reset_traffic();
  std::vector<at::Tensor> parameters{at::ones({8, 4}).requires_grad_(),
                                     at::ones({8}).requires_grad_()};
  std::vector<std::string> names;
  c10d::Reducer reducer(parameters, {{0, 1}}, process_group(world()), {false, false}, 1 << 20,
                        false, false, {}, 1 << 20, false, false, {});
  reducer.prepare_for_forward();
  reducer.prepare_for_backward({});
  const auto input = at::full({1, 4}, world().rank() + 1.0);
  at::linear(input, parameters[0], parameters[1]).sum().backward();
  EXPECT_TRUE(at::allclose(parameters[0].grad(), at::full({8, 4}, (world().size() + 1) / 2.0)));
  EXPECT_GE(world().traffic().by_kind.at("all_reduce").bytes, 40 * 4);
}

TEST(Waiting, CostsNoCore) {
  world().barrier();
  const auto tensor = at::ones({16});
  if (world().rank() == 0) {
    auto work = world().all_reduce(tensor);
    const double before = processor_seconds();
    work.wait();
    const double spent = processor_seconds() - before;
    // Rank 1 comes 1.5 s late; a busy wait would have taken all of them.
    EXPECT_LT(spent, 0.3) << "processor seconds in a wait of 1.5 s";
  } else {
    std::this_thread::sleep_for(milliseconds(1500));
    world().all_reduce(tensor).wait();
  }
  EXPECT_EQ(tensor[0].item<int>(), world().size());
}

TEST(Waiting, AnAllReduceGoesOnWhileTheCallerComputes) {
  const auto tensor = at::ones({1 << 20});
  auto work = world().all_reduce(tensor);
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  double sum = 0;
  while (!work.done() && std::chrono::steady_clock::now() < limit)
    sum += at::ones({1000}).sum().item<double>();
  EXPECT_TRUE(work.done()) << "it never finished by itself";
  EXPECT_GT(sum, 0);
  work.wait();
  EXPECT_EQ(tensor[12345].item<int>(), world().size());
}

TEST(Waiting, ManyAtOnceFinishInAnyOrder) {
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  for (int index = 0; index < 50; ++index) {
    tensors.push_back(at::full({100 * (index % 7 + 1)}, index, at::kFloat));
    works.push_back(world().all_reduce(tensors.back()));
  }
  for (int index = 49; index >= 0; --index) {
    works[index].wait();
    EXPECT_EQ(tensors[index][0].item<int>(), index * world().size());
  }
}

TEST(Mesh, LaysRanksOutAlongAxes) {
  if (world().size() != 4) GTEST_SKIP() << "a mesh of 2 by 2 needs 4 ranks";
  const Mesh mesh(world(), {{"dp_replicate", 2}, {"tp", 1}, {"dp_shard", 2}},
                  {{"dp_replicate", "dp_shard"}, {"dp_shard", "dp_replicate"}, {"tp", "dp_shard"}});
  const int rank = world().rank();
  EXPECT_EQ(mesh.coordinate("dp_replicate"), rank / 2);
  EXPECT_EQ(mesh.coordinate("dp_shard"), rank % 2);
  EXPECT_EQ(mesh.group("dp_shard").global_ranks(),
            (std::vector<int>{rank / 2 * 2, rank / 2 * 2 + 1}));
  EXPECT_EQ(mesh.group("dp_replicate").global_ranks(), (std::vector<int>{rank % 2, rank % 2 + 2}));
  EXPECT_EQ(mesh.flattened({"dp_replicate", "dp_shard"}).global_ranks(),
            (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(mesh.flattened({"dp_shard", "dp_replicate"}).global_ranks(),
            (std::vector<int>{0, 2, 1, 3}));
  const auto tensor = at::full({1}, rank, at::kFloat);
  mesh.group("dp_replicate").all_reduce(tensor).wait();
  EXPECT_EQ(tensor.item<float>(), 2.0f * (rank % 2) + 2);
  EXPECT_THROW(mesh.group("cp"), ConfigError);
  EXPECT_THROW(mesh.flattened({"dp_shard", "tp"}), ConfigError);
  // What consists of the same ranks is one group.
  EXPECT_EQ(mesh.flattened({"dp_replicate", "dp_shard"}).impl(), world().impl());
  EXPECT_EQ(mesh.flattened({"tp", "dp_shard"}).impl(), mesh.group("dp_shard").impl());
  const Mesh again(world(), {{"a", 2}, {"b", 2}});
  EXPECT_EQ(again.group("b").impl(), mesh.group("dp_shard").impl());
}

TEST(Mesh, RefusesWhatDoesNotFit) {
  EXPECT_THROW(Mesh(world(), {{"a", world().size() + 1}}), ConfigError);
  EXPECT_THROW(Mesh(world(), {{"a", 1}, {"a", world().size()}}), ConfigError);
  EXPECT_THROW(Mesh(world(), {{"a", 0}}), ConfigError);
  const Mesh line(world(), {{"a", 1}, {"b", world().size()}});
  EXPECT_EQ(line.group("a").size(), 1);
  EXPECT_EQ(line.group("b").size(), world().size());
}

TEST(World, WritingToADeadProcessIsAnErrorAndNoSignal) {
  if (world().size() == 1) GTEST_SKIP() << "one process writes to nobody";
  struct sigaction current {};
  ASSERT_EQ(::sigaction(SIGPIPE, nullptr, &current), 0);
  EXPECT_EQ(current.sa_handler, SIG_IGN);
}

}  // namespace
}  // namespace accelerate::comm
