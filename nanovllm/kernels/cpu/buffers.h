// Memory that a thread keeps from step to step. Linux hands out new memory page by page, each filled with zeros, and each
// first access to one of them is a fault.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

#include <sys/mman.h>

namespace nanovllm {

// A thread's blocks that nothing uses now, by the logarithm of their bytes.
class KeptMemory {
   public:
    ~KeptMemory() {
        for (auto& blocks : free_)
            for (void* block : blocks) std::free(block);
    }

    // At least 64 bytes, aligned to 64.
    void* take(int kind) {
        auto& blocks = free_[kind];
        if (blocks.empty()) {
            const size_t size = (size_t)1 << kind;
            void* block = std::aligned_alloc(size >= HUGE_PAGE ? HUGE_PAGE : 64, size);
            if (!block) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
            // Products read a piece of each token's row: with pages of 4 KiB, each at another page.
            if (size >= HUGE_PAGE) madvise(block, size, MADV_HUGEPAGE);
#endif
            return block;
        }
        void* block = blocks.back();
        blocks.pop_back();
        kept_ -= (size_t)1 << kind;
        return block;
    }

    void give(void* block, int kind) {
        if (kept_ + ((size_t)1 << kind) > MOST) return std::free(block);
        try {
            free_[kind].push_back(block);
        } catch (const std::bad_alloc&) {
            return std::free(block);
        }
        kept_ += (size_t)1 << kind;
    }

   private:
    static constexpr size_t HUGE_PAGE = (size_t)2 << 20;
    static constexpr size_t MOST = (size_t)64 << 20;  // bytes: a prompt that needs more takes a second or longer
    std::array<std::vector<void*>, 64> free_;
    size_t kept_ = 0;
};

inline KeptMemory& kept_memory() {
    thread_local KeptMemory memory;
    return memory;
}

// An array whose elements have no initial values. It is resized and destroyed in the thread that made it.
template <typename T>
class Buffer {
   public:
    Buffer() = default;
    explicit Buffer(size_t size) { resize(size); }
    Buffer(Buffer&& other) { *this = std::move(other); }
    Buffer& operator=(Buffer&& other) {
        std::swap(data_, other.data_), std::swap(size_, other.size_), std::swap(kind_, other.kind_);
        return *this;
    }
    ~Buffer() {
        if (data_) kept_memory().give(data_, kind_);
    }

    // The elements lose their values.
    void resize(size_t size) {
        const int kind = std::bit_width(std::max<size_t>(64, size * sizeof(T)) - 1);
        if (data_ && kind != kind_) kept_memory().give(std::exchange(data_, nullptr), kind_);
        size_ = 0;
        if (size && !data_) data_ = (T*)kept_memory().take(kind_ = kind);
        size_ = size;
    }

    T* data() { return data_; }
    const T* data() const { return data_; }
    T& operator[](size_t i) { return data_[i]; }
    const T& operator[](size_t i) const { return data_[i]; }
    size_t size() const { return size_; }
    bool empty() const { return size_ == 0; }

   private:
    T* data_ = nullptr;
    size_t size_ = 0;
    int kind_ = 0;
};

}  // namespace nanovllm
