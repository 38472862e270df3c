/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/fakecuda/emulate_fiber.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#define WITH_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WITH_ASAN 1
#endif
#endif
#ifndef WITH_ASAN
#define WITH_ASAN 0
#endif

#if WITH_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

/*
 * Distances between stacks are not powers of two, and stacks begin at different offsets of their
 * last pages. Otherwise the tops of all stacks, which a switch touches, would compete for the same
 * few cache lines.
 */
enum { STACK = WITH_ASAN ? 256 << 10 : 64 << 10, GUARD = 4 << 10, PLACES = 64, PLACE = 64 };

struct fiber {
        void (*work)(void *data);
        void *data;
#if defined(__x86_64__) || defined(__aarch64__)
        void *mine, *other; /* stack pointer of the side that sleeps */
#else
        ucontext_t mine, other;
#endif
        uint8_t *stack, *top;
        const void *other_stack; /* ASan: the stack of the code that resumed the fiber */
        size_t other_size;
        void *fake; /* ASan: the fiber's fake stack */
};

/* ---- the switch ------------------------------------------------------------------------------ */

#if defined(__x86_64__)
void emulate_switch(void **from, void *to);
__asm__(".text\n"
        ".hidden emulate_switch\n"
        ".globl emulate_switch\n"
        ".type emulate_switch, @function\n"
        "emulate_switch:\n"
        "        pushq %rbp\n"
        "        pushq %rbx\n"
        "        pushq %r12\n"
        "        pushq %r13\n"
        "        pushq %r14\n"
        "        pushq %r15\n"
        "        movq %rsp, (%rdi)\n"
        "        movq %rsi, %rsp\n"
        "        popq %r15\n"
        "        popq %r14\n"
        "        popq %r13\n"
        "        popq %r12\n"
        "        popq %rbx\n"
        "        popq %rbp\n"
        "        ret\n"
        ".size emulate_switch, . - emulate_switch\n"
        ".previous\n");

static void *first_frame(uint8_t *top, void (*entry)(void)) {
        void **frame = (void **)top - 8;

        for (int i = 0; i < 8; i++)
                frame[i] = NULL;
        frame[6] = (void *)(uintptr_t)entry; /* so that the stack is aligned as after a call */
        return frame;
}
#elif defined(__aarch64__)
void emulate_switch(void **from, void *to);
__asm__(".text\n"
        ".hidden emulate_switch\n"
        ".globl emulate_switch\n"
        ".type emulate_switch, %function\n"
        "emulate_switch:\n"
        "        sub sp, sp, #160\n"
        "        stp x19, x20, [sp, #0]\n"
        "        stp x21, x22, [sp, #16]\n"
        "        stp x23, x24, [sp, #32]\n"
        "        stp x25, x26, [sp, #48]\n"
        "        stp x27, x28, [sp, #64]\n"
        "        stp x29, x30, [sp, #80]\n"
        "        stp d8, d9, [sp, #96]\n"
        "        stp d10, d11, [sp, #112]\n"
        "        stp d12, d13, [sp, #128]\n"
        "        stp d14, d15, [sp, #144]\n"
        "        mov x9, sp\n"
        "        str x9, [x0]\n"
        "        mov sp, x1\n"
        "        ldp x19, x20, [sp, #0]\n"
        "        ldp x21, x22, [sp, #16]\n"
        "        ldp x23, x24, [sp, #32]\n"
        "        ldp x25, x26, [sp, #48]\n"
        "        ldp x27, x28, [sp, #64]\n"
        "        ldp x29, x30, [sp, #80]\n"
        "        ldp d8, d9, [sp, #96]\n"
        "        ldp d10, d11, [sp, #112]\n"
        "        ldp d12, d13, [sp, #128]\n"
        "        ldp d14, d15, [sp, #144]\n"
        "        add sp, sp, #160\n"
        "        ret\n"
        ".size emulate_switch, . - emulate_switch\n"
        ".previous\n");

static void *first_frame(uint8_t *top, void (*entry)(void)) {
        void **frame = (void **)(top - 160);

        for (int i = 0; i < 20; i++)
                frame[i] = NULL;
        frame[11] = (void *)(uintptr_t)entry;
        return frame;
}
#endif

#if defined(__x86_64__) || defined(__aarch64__)
#define SWITCH(from, to) emulate_switch(&(from), to)
#else
#define SWITCH(from, to) swapcontext(&(from), &(to))
#endif

/* ---- ASan must know whose stack it looks at -------------------------------------------------- */

static void leave(void **fake, const void *stack, size_t size) {
#if WITH_ASAN
        __sanitizer_start_switch_fiber(fake, stack, size);
#endif
}

static void arrive(void *fake, const void **stack, size_t *size) {
#if WITH_ASAN
        __sanitizer_finish_switch_fiber(fake, stack, size);
#endif
}

/* ---- fibers ---------------------------------------------------------------------------------- */

static struct fiber *starting; /* the fiber that enters its first frame */

static void entry(void) {
        struct fiber *fiber = starting;

        arrive(NULL, &fiber->other_stack, &fiber->other_size);
        for (;;) {
                fiber->work(fiber->data);
                fiber_yield(fiber);
        }
}

static void begin(struct fiber *fiber) {
#if defined(__x86_64__) || defined(__aarch64__)
        fiber->mine = first_frame(fiber->top, entry);
#else
        getcontext(&fiber->mine);
        fiber->mine.uc_stack.ss_sp = fiber->stack;
        fiber->mine.uc_stack.ss_size = (size_t)(fiber->top - fiber->stack);
        makecontext(&fiber->mine, entry, 0);
#endif
}

struct fiber *fiber_new(void (*work)(void *data), void *data) {
        static unsigned place;
        struct fiber *fiber = calloc(1, sizeof *fiber);
        uint8_t *at = mmap(NULL, GUARD + STACK, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

        if (!fiber || at == MAP_FAILED || mprotect(at + GUARD, STACK, PROT_READ | PROT_WRITE) < 0) {
                fprintf(stderr, "emulate: no memory for another thread\n");
                abort();
        }
        fiber->work = work;
        fiber->data = data;
        fiber->stack = at + GUARD;
        fiber->top = fiber->stack + STACK - place++ * 5 % PLACES * PLACE;
        begin(fiber);
        return fiber;
}

void fiber_resume(struct fiber *fiber) {
        void *fake = NULL;

        starting = fiber;
        leave(&fake, fiber->stack, (size_t)(fiber->top - fiber->stack));
        SWITCH(fiber->other, fiber->mine);
        arrive(fake, NULL, NULL);
}

void fiber_yield(struct fiber *fiber) {
        leave(&fiber->fake, fiber->other_stack, fiber->other_size);
        SWITCH(fiber->mine, fiber->other);
        arrive(fiber->fake, &fiber->other_stack, &fiber->other_size);
}
