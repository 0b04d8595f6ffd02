// Threads that work on one forward together.
//
// A forward is a single parallel region, in which threads wait for each other some hundred times:
// that takes a microsecond each, a region ten. OpenMP's threads are those that PyTorch uses, so
// that no second set of them competes for the cores.
#pragma once

#include <sched.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <climits>
#if defined(__SANITIZE_THREAD__)
#include <thread>
#include <vector>
#else
#include <omp.h>
#endif

namespace eaglegbv {

constexpr int SPINS = 1000;  // some 30 microseconds; then others may have the core

struct Barrier {
  std::atomic<int> arrived{0}, turn{0}, asleep{0};

  void sleep(int before) {  // while it is still the turn before
#if defined(__linux__)
    asleep++;
    syscall(SYS_futex, &turn, FUTEX_WAIT_PRIVATE, before, nullptr);
    asleep--;
#else
    sched_yield();
#endif
  }

  void begin(int next) {
    arrived = 0;
    turn = next;
#if defined(__linux__)
    if (asleep) syscall(SYS_futex, &turn, FUTEX_WAKE_PRIVATE, INT_MAX);
#endif
  }
};

class Team {
 public:
  const int size, number;  // threads, and which of them this is

  Team(Barrier& barrier, int size, int number)
      : size(size), number(number), barrier_(barrier), turn_(barrier.turn.load()) {}

  void wait() {
    const int next = ++turn_;
    if (++barrier_.arrived == size) return barrier_.begin(next);
    for (int spins = 0; barrier_.turn != next; spins++) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      if (spins >= SPINS) barrier_.sleep(next - 1);
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
