// Threads that work on one forward together.
//
// A forward is a single parallel region, in which threads wait for each other some hundred times:
// that takes a microsecond each, a region ten. OpenMP's threads are those that PyTorch uses, so
// that no second set of them competes for the cores.
#pragma once

#include <sched.h>

#include <atomic>
#if defined(__SANITIZE_THREAD__)
#include <thread>
#include <vector>
#else
#include <omp.h>
#endif

namespace eaglegbv {

constexpr int SPINS = 1000;  // some 30 microseconds; then others may have the core

struct Barrier {
  std::atomic<int> arrived{0}, turn{0};
};

class Team {
 public:
  const int size, number;  // threads, and which of them this is

  Team(Barrier& barrier, int size, int number)
      : size(size), number(number), barrier_(barrier), turn_(barrier.turn.load()) {}

  void wait() {
    const int next = ++turn_;
    if (barrier_.arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      barrier_.arrived.store(0, std::memory_order_relaxed);
      barrier_.turn.store(next, std::memory_order_release);
      return;
    }
    for (int spins = 0; barrier_.turn.load(std::memory_order_acquire) != next; spins++) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      if (spins >= SPINS) sched_yield();
    }
  }

  // This thread's share of `count` things, in whole units.
  std::pair<int, int> share(int count, int unit) const {
    const long units = (count + unit - 1) / unit;
    const long from = units * number / size * unit, to = units * (number + 1) / size * unit;
    return {(int)from, to < count ? (int)to : count};
  }

 private:
  Barrier& barrier_;
  int turn_;
};

// Runs `work(Team&)` on so many threads; no two calls may share a barrier at once.
template <class Work>
void in_team(Barrier& barrier, int threads, Work work) {
#if defined(__SANITIZE_THREAD__)  // it does not see how GNU's OpenMP starts and ends threads
  std::vector<std::thread> others;
  for (int number = 0; number < threads; number++)
    others.emplace_back([&, number] { Team team(barrier, threads, number); work(team); });
  for (auto& other : others) other.join();
#else
#pragma omp parallel num_threads(threads)
  {
    Team team(barrier, omp_get_num_threads(), omp_get_thread_num());
    work(team);
  }
#endif
}

}  // namespace eaglegbv
