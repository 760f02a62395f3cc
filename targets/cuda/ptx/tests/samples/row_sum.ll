; out[row] = sum of the bf16 of a row, with an f32 sum; a block of 128 threads a row. Warps are summed by shuffles, and their
; sums through shared memory. Two elements are loaded at once.
target triple = "nvptx64-nvidia-cuda"

@sums = internal addrspace(3) global [4 x float] undef, align 4

declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
declare float @llvm.nvvm.shfl.sync.bfly.f32(i32, float, i32, i32)
declare void @llvm.nvvm.barrier.cta.sync.aligned.all(i32)

define internal float @warp_sum(float %x) noinline {
  %s16 = call float @llvm.nvvm.shfl.sync.bfly.f32(i32 -1, float %x, i32 16, i32 31)
  %a16 = fadd float %x, %s16
  %s8 = call float @llvm.nvvm.shfl.sync.bfly.f32(i32 -1, float %a16, i32 8, i32 31)
  %a8 = fadd float %a16, %s8
  %s4 = call float @llvm.nvvm.shfl.sync.bfly.f32(i32 -1, float %a8, i32 4, i32 31)
  %a4 = fadd float %a8, %s4
  %s2 = call float @llvm.nvvm.shfl.sync.bfly.f32(i32 -1, float %a4, i32 2, i32 31)
  %a2 = fadd float %a4, %s2
  %s1 = call float @llvm.nvvm.shfl.sync.bfly.f32(i32 -1, float %a2, i32 1, i32 31)
  %a1 = fadd float %a2, %s1
  ret float %a1
}

define ptx_kernel void @row_sum(ptr addrspace(1) noalias readonly align 16 %rows, ptr addrspace(1) noalias %out, i32 %columns) #0 {
entry:
  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %row = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %row64 = zext i32 %row to i64
  %columns64 = zext i32 %columns to i64
  %start = mul i64 %row64, %columns64
  %base = getelementptr bfloat, ptr addrspace(1) %rows, i64 %start
  %first = shl i32 %tid, 1
  br label %test
test:
  %i = phi i32 [ %first, %entry ], [ %next, %body ]
  %sum = phi float [ 0.0, %entry ], [ %sum1, %body ]
  %more = icmp ult i32 %i, %columns
  br i1 %more, label %body, label %done
body:
  %i64 = zext i32 %i to i64
  %p = getelementptr bfloat, ptr addrspace(1) %base, i64 %i64
  %pair = load <2 x bfloat>, ptr addrspace(1) %p, align 4
  %x0 = extractelement <2 x bfloat> %pair, i32 0
  %x1 = extractelement <2 x bfloat> %pair, i32 1
  %f0 = fpext bfloat %x0 to float
  %f1 = fpext bfloat %x1 to float
  %sum0 = fadd float %sum, %f0
  %sum1 = fadd float %sum0, %f1
  %next = add i32 %i, 256
  br label %test
done:
  %warp_sum = call float @warp_sum(float %sum)
  %lane = and i32 %tid, 31
  %warp = lshr i32 %tid, 5
  %warp64 = zext i32 %warp to i64
  %leads = icmp eq i32 %lane, 0
  br i1 %leads, label %put, label %wait
put:
  %slot = getelementptr float, ptr addrspace(3) @sums, i64 %warp64
  store float %warp_sum, ptr addrspace(3) %slot
  br label %wait
wait:
  call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)
  %zero = icmp eq i32 %tid, 0
  br i1 %zero, label %last, label %end
last:
  %v0 = load float, ptr addrspace(3) @sums
  %v1 = load float, ptr addrspace(3) getelementptr (float, ptr addrspace(3) @sums, i64 1)
  %v2 = load float, ptr addrspace(3) getelementptr (float, ptr addrspace(3) @sums, i64 2)
  %v3 = load float, ptr addrspace(3) getelementptr (float, ptr addrspace(3) @sums, i64 3)
  %t0 = fadd float %v0, %v1
  %t1 = fadd float %v2, %v3
  %t = fadd float %t0, %t1
  %o = getelementptr float, ptr addrspace(1) %out, i64 %row64
  store float %t, ptr addrspace(1) %o
  br label %end
end:
  ret void
}

attributes #0 = { "nvvm.reqntid"="128,1,1" }
