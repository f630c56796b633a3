/* Machine-dependent parts of runner.c: system calls, starting a process on its own stack, and the entry point. */

#if defined(__x86_64__)
enum { READ = 0, WRITE = 1, CLOSE = 3, LSEEK = 8, MMAP = 9, CLONE = 56, EXECVE = 59, EXIT = 231, WAIT4 = 61 };
enum { KILL = 62, CHDIR = 80, GETPID = 39, SETSID = 112, OPENAT = 257 };

static long call(long number, long a, long b, long c, long d, long e) {
  long result;
  register long r10 __asm__("r10") = d;
  register long r8 __asm__("r8") = e;
  register long r9 __asm__("r9") = 0;
  __asm__ volatile("syscall"
                   : "=a"(result)
                   : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                   : "rcx", "r11", "memory");
  return result;
}

/* Starts a process that shares this memory and runs function(argument) on its own stack. Sets *pid before it runs. */
static long start(long flags, char *stack, int *pid, void (*function)(void *), void *argument) {
  long result;
  register long r10 __asm__("r10") = 0;
  register long r8 __asm__("r8") = 0;
  register void *r12 __asm__("r12") = argument;
  __asm__ volatile("syscall\n test %%rax, %%rax\n jnz 1f\n xor %%ebp, %%ebp\n mov %%r12, %%rdi\n call *%%rbx\n hlt\n 1:"
                   : "=a"(result)
                   : "a"(CLONE), "D"(flags), "S"(stack), "d"(pid), "r"(r10), "r"(r8), "r"(r12), "b"(function)
                   : "rcx", "r11", "memory");
  return result;
}

__asm__(".globl _start\n_start:\n xor %ebp, %ebp\n mov %rsp, %rdi\n and $-16, %rsp\n call begin\n hlt\n");

#elif defined(__aarch64__)
enum { READ = 63, WRITE = 64, CLOSE = 57, LSEEK = 62, MMAP = 222, CLONE = 220, EXECVE = 221, EXIT = 94, WAIT4 = 260 };
enum { KILL = 129, CHDIR = 49, GETPID = 172, SETSID = 157, OPENAT = 56 };

static long call(long number, long a, long b, long c, long d, long e) {
  register long x8 __asm__("x8") = number;
  register long x0 __asm__("x0") = a;
  register long x1 __asm__("x1") = b;
  register long x2 __asm__("x2") = c;
  register long x3 __asm__("x3") = d;
  register long x4 __asm__("x4") = e;
  register long x5 __asm__("x5") = 0;
  __asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
  return x0;
}

static long start(long flags, char *stack, int *pid, void (*function)(void *), void *argument) {
  register long x8 __asm__("x8") = CLONE;
  register long x0 __asm__("x0") = flags;
  register char *x1 __asm__("x1") = stack;
  register int *x2 __asm__("x2") = pid;
  register long x3 __asm__("x3") = 0;
  register long x4 __asm__("x4") = 0;
  register void (*x19)(void *) __asm__("x19") = function;
  register void *x20 __asm__("x20") = argument;
  __asm__ volatile("svc #0\n cbnz x0, 1f\n mov x29, xzr\n mov x0, x20\n blr x19\n brk #0\n 1:"
                   : "+r"(x0)
                   : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x19), "r"(x20)
                   : "memory");
  return x0;
}

__asm__(".globl _start\n_start:\n mov x29, xzr\n mov x0, sp\n bl begin\n brk #0\n");
#endif
