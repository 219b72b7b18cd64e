// An operator new that gets no memory from some call on, while it is armed: preloaded into a process whose C++ is tested.
#include <atomic>
#include <cstdlib>
#include <new>

static std::atomic<long> left{-1}, failed{0};  // left: calls that still succeed; negative: all do

extern "C" void fail_after(long calls) { failed.store(0), left.store(calls); }
extern "C" long stop_failing() { return left.store(-1), failed.load(); }

static void* taken(std::size_t bytes, std::size_t alignment) {
  if (left.load() >= 0 && left.fetch_sub(1) <= 0) {
    left.store(0), failed.fetch_add(1);
    throw std::bad_alloc();
  }
  void* memory = alignment ? std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment)
                           : std::malloc(bytes ? bytes : 1);
  if (!memory) throw std::bad_alloc();
  return memory;
}

void* operator new(std::size_t bytes) { return taken(bytes, 0); }
void* operator new[](std::size_t bytes) { return taken(bytes, 0); }
void* operator new(std::size_t bytes, std::align_val_t alignment) { return taken(bytes, (std::size_t)alignment); }
void* operator new[](std::size_t bytes, std::align_val_t alignment) { return taken(bytes, (std::size_t)alignment); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
