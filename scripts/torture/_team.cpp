// What the kernels use of libgomp, made of plain threads: ThreadSanitizer follows those, but not libgomp's own ways of waiting.
// Linked into a library it serves that library alone. A loop is dealt out in turns, without anything that all threads touch, so that
// nothing but the kernels' own barriers orders what two threads do.
#include <chrono>
#include <pthread.h>
#include <thread>
#include <vector>

namespace {

struct Team {
  explicit Team(unsigned threads) : size(threads) { pthread_barrier_init(&barrier, nullptr, threads); }
  ~Team() { pthread_barrier_destroy(&barrier); }
  const unsigned size;
  pthread_barrier_t barrier;
};

struct Loop {
  long next, end, chunk;
};

thread_local Team* team = nullptr;
thread_local int self = 0;
thread_local Loop loop;

void work(Team& mine, int number, void (*body)(void*), void* data) {
  team = &mine;
  self = number;
  body(data);
  team = nullptr;
  self = 0;
}

}  // namespace

#pragma GCC visibility push(hidden)
extern "C" {

int omp_get_num_threads() { return team ? static_cast<int>(team->size) : 1; }
int omp_get_thread_num() { return self; }
double omp_get_wtime() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
  Team mine(threads ? threads : 1);
  std::vector<std::thread> others;
  for (unsigned number = 1; number < mine.size; ++number) others.emplace_back(work, std::ref(mine), number, body, data);
  work(mine, 0, body, data);
  for (std::thread& other : others) other.join();
}

void GOMP_barrier() {
#ifndef WITHOUT_BARRIERS
  pthread_barrier_wait(&team->barrier);
#endif
}

bool GOMP_loop_nonmonotonic_dynamic_next(long* from, long* to) {
  if (loop.next >= loop.end) return false;
  *from = loop.next;
  *to = loop.end - loop.next < loop.chunk ? loop.end : loop.next + loop.chunk;
  loop.next += loop.chunk * team->size;
  return true;
}

bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long, long chunk, long* from, long* to) {
  loop = {start + self * chunk, end, chunk};
  return GOMP_loop_nonmonotonic_dynamic_next(from, to);
}

void GOMP_loop_end_nowait() {}

void GOMP_critical_name_start(void** name) {
  while (__atomic_exchange_n(name, reinterpret_cast<void*>(1), __ATOMIC_ACQUIRE)) std::this_thread::yield();
}

void GOMP_critical_name_end(void** name) { __atomic_store_n(name, nullptr, __ATOMIC_RELEASE); }

}  // extern "C"
#pragma GCC visibility pop
